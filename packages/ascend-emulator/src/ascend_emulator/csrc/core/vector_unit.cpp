// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "vector_unit.h"

#include "status.h"

namespace at {
__attribute__((visibility("default"))) std::string
get_cpu_capability();  // ATen/Version.h, which includes much more
}

namespace emu {

VectorUnit vector_unit() {
#if defined(__x86_64__)
  static const VectorUnit unit = [] {
    const auto capability = at::get_cpu_capability();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        capability.find("AVX") != 0)
      return VectorUnit::generic;
    if (capability == "AVX2" || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
      return VectorUnit::avx2;
    // The values of oneDNN's variable with which its kernels use AVX-512 without bfloat16.
    const std::string_view limit = std::getenv("ONEDNN_MAX_CPU_ISA") ?: "";
    const bool bf16 = limit != "AVX512_CORE" && limit != "AVX512_CORE_VNNI";
    return bf16 && __builtin_cpu_supports("avx512bf16") ? VectorUnit::avx512_bf16
                                                        : VectorUnit::avx512;
  }();
  return unit;
#else
  return VectorUnit::generic;
#endif
}

}  // namespace emu

// For `ascend-emulator verify`.
EXPORT const char* ascend_emulator_vector_unit() {
  static const char* const names[] = {"generic", "AVX2", "AVX512", "AVX512_BF16"};
  return names[static_cast<int>(emu::vector_unit())];
}
