// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Supported dtypes of operators: torch_npu's documentation of the torch functions that call them
// (dtypes.h), and the chip.
#include "op.h"

#include <unordered_map>

namespace emu {
namespace {

struct Documented {
  const char *dtypes, *operators;  // without "aclnn"
};
constexpr Documented kDocumented[] = {
#include "generated/dtypes.h"
};

constexpr std::pair<const char*, at::ScalarType> kNames[] = {{"bf16", at::kBFloat16},
    {"fp16", at::kHalf}, {"fp32", at::kFloat}, {"fp64", at::kDouble}, {"uint8", at::kByte},
    {"int8", at::kChar}, {"int16", at::kShort}, {"int32", at::kInt}, {"int64", at::kLong},
    {"bool", at::kBool}, {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble}};

constexpr DTypeSet bit(at::ScalarType dtype) { return DTypeSet{1} << static_cast<int>(dtype); }

DTypeSet parsed(const char* list) {
  DTypeSet set = 0;
  std::istringstream words(list);
  for (std::string word; words >> word;)
    for (const auto& [name, dtype] : kNames)
      if (word == name) set |= bit(dtype);
  return set;
}

}  // namespace

DTypeSet documented(const char* name) {
  static const std::unordered_map<std::string, DTypeSet> all = [] {
    std::unordered_map<std::string, DTypeSet> out;
    for (const auto& [dtypes, operators] : kDocumented) {
      std::istringstream words(operators);
      for (std::string word; words >> word;) out.emplace("aclnn" + word, parsed(dtypes));
    }
    return out;
  }();
  const auto found = all.find(name);
  return found == all.end() ? 0 : found->second;
}

void check_dtypes(const std::vector<Tensor>& tensors, size_t first, size_t last, DTypeSet allowed,
    const char* parameters, int position) {
  for (; first < last; ++first) {
    if (!tensors[first].defined()) continue;
    const auto found = tensors[first].scalar_type();
    const auto refused = [&](const auto&... why) {
      throw Error(kOpParam, text(nth(parameters, position), " is ", found, "; ", why...));
    };
    // Each page of torch_npu's documentation with float8 lists it only for Ascend950.
    if (c10::isFloat8Type(found) && !is_chip("Ascend950"))
      refused(chip().name, " does not compute in float8; use uint8 views");
    if (found == at::kBFloat16 && !chip().bfloat16)
      refused(chip().name, " does not compute in bfloat16; use float16");
    if (allowed && !(allowed & bit(found))) {
      std::vector<at::ScalarType> names;
      for (const auto& [name, dtype] : kNames)
        if (allowed & bit(dtype) && (dtype != at::kBFloat16 || chip().bfloat16))
          names.push_back(dtype);
      refused("allowed: ", listed(names));
    }
  }
}

}  // namespace emu
