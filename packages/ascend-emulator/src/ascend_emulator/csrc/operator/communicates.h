// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators that communicate with other ranks: their tasks may block, as collectives do
// (Task::blocks in core/stream.h).
#pragma once
#include <functional>
#include <string>

namespace emu {

// Whether this operator does; `register_it` adds it to the set.
bool communicates(const char* name, bool register_it);

// What to do if the operator that this thread prepares fails on its stream: the other ranks must
// learn of it.
using OnFailure = std::function<void(const std::string& reason)>;
void on_failure(OnFailure failed);

}  // namespace emu
