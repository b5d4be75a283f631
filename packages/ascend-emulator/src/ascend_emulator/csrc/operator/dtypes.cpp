// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Supported dtypes of operators: the chip's, and those of the table of facts.
#include "op.h"

namespace emu {
namespace {

// In the order in which messages name them.
constexpr at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble, at::kByte,
    at::kChar, at::kShort, at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble};

constexpr DTypeSet bit(at::ScalarType dtype) { return DTypeSet{1} << static_cast<int>(dtype); }

}  // namespace

void check_dtypes(const std::vector<Tensor>& tensors, size_t first, size_t last, DTypeSet allowed,
    const char* parameters, int position) {
  for (; first < last; ++first) {
    if (!tensors[first].defined()) continue;
    const auto found = tensors[first].scalar_type();
    const auto refused = [&](const auto&... why) {
      raise(kOpParam, {nth(parameters, position), " is ", found, "; ", why...});
    };
    // Each page of torch_npu's documentation with float8, HiF8 or float4 lists it only for
    // Ascend950.
    const bool narrow =
        c10::isFloat8Type(found) || c10::isBitsType(found) || found == at::kFloat4_e2m1fn_x2;
    if (narrow && !is_chip("Ascend950"))
      refused(chip().name, " does not compute in float8, HiF8 or float4; use uint8 views");
    if (found == at::kBFloat16 && !chip().bfloat16)
      refused(chip().name, " does not compute in bfloat16; use float16");
    if (allowed && !(allowed & bit(found))) {
      std::vector<at::ScalarType> names;
      for (const auto dtype : kDtypes)
        if (allowed & bit(dtype) && (dtype != at::kBFloat16 || chip().bfloat16))
          names.push_back(dtype);
      refused("allowed: ", listed(names));
    }
  }
}

}  // namespace emu
