// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#pragma once
#include <cstdint>
#include <string>

namespace emu {

// Option of graph operators that aclSetCompileopt has set (aclCompileOpt); "disable" without.
std::string compile_option(int32_t option);
// Whether operators are compiled at run time, for each new shape.
bool compiles_at_run_time();

}  // namespace emu
