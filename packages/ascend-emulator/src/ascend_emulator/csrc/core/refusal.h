// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What the emulator does not have, and operators that failed.
#pragma once
#include <optional>

#include "status.h"

namespace emu {

// Fails because the entry point is not emulated; the message contains its name.
int refuse(const char* name);
// For those that return no status: prints the message and returns 0.
long refuse_value(const char* name);

// For C++ functions of CANN's graph engine: throws, which torchair passes on as a Python exception.
[[noreturn]] void refuse_engine(const char* name);

// Returns the status of an operator. When an operator fails on torch_npu's queue thread, the thread
// ends: torch_npu raises that error once and silently drops everything queued for that NPU later.
// So a failure on that thread is kept, and synchronizing with the NPU fails from then on.
int operator_done(const char* name, int status);
// Creation calls of arguments return null on failure; torch_npu passes the null on, so the operator
// reports this reason. Cleared when an operator is done, which need not look at each argument.
extern thread_local std::optional<Error> creation_error;
void check_queue(int device);  // throws if an operator failed on this NPU's queue thread

}  // namespace emu
