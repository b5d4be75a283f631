// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What the kernels use of this CPU, by what ATen does, which the variable ATEN_CPU_CAPABILITY
// limits. limits.py has the same rules.
#pragma once

namespace emu {

enum class VectorUnit { generic, avx2, avx512, avx512_bf16 };
VectorUnit vector_unit();

}  // namespace emu
