// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#pragma once
#include <string>

namespace emu {

// What is wrong with the variables ASCEND_EMULATOR_WITHOUT, _FAULTS and _ALLOW; empty if nothing
// is. They are read at the first call, when all entry points are registered.
const std::string& complaint();

}  // namespace emu
