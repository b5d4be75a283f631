// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Fault injection:
// ASCEND_EMULATOR_FAULTS="aclrtMalloc@3=oom;aclnnMatmul@10=ecc;stream@100=hang;HcclAllReduce@2+=timeout",
// or ascend_emulator_inject() with the same text. `NAME@N=KIND` fails the Nth call of an entry
// point, `NAME@N+=KIND` that and every later one; each process counts calls from the injection.
#pragma once

#include <string>

namespace emu::fault {

bool armed();
// Injects the faults of the variable, once (complaint.h); returns what is wrong with one.
std::string read_environment();

// Called by each entry point: throws if a fault is due.
void at(const char* name);

// Fault that the current call has to carry out itself: an operator or collective hangs on its
// stream, a collective times out or loses its connection. Returned once; call only if armed().
enum class Kind { none, oom, ecc, uce, error, hang, timeout, drop };
Kind pending();

// Called when a task is submitted: whether it must hang.
bool hangs();

}  // namespace emu::fault
