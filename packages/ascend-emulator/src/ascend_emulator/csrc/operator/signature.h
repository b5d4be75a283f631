// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Compares an operator's parameters with op-plugin's calls (facts/arguments.toml) when it is
// compiled.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

struct aclTensor;
struct aclTensorList;
struct aclScalar;
struct aclScalarList;
struct aclIntArray;
struct aclFloatArray;
struct aclBoolArray;

namespace emu {

struct Call {
  std::string_view name, kinds;
};
inline constexpr Call kCalls[] = {
#include "generated/arguments.h"  // facts.py
};

// The letter of a C type in facts/arguments.toml.
template <class C> constexpr char kind_of() {
  if constexpr (std::is_same_v<C, const aclTensor*>) return 'T';
  if constexpr (std::is_same_v<C, const aclTensorList*>) return 'L';
  if constexpr (std::is_same_v<C, const aclScalar*>) return 'S';
  if constexpr (std::is_same_v<C, const aclScalarList*>) return 'R';
  if constexpr (std::is_same_v<C, const aclIntArray*>) return 'I';
  if constexpr (std::is_same_v<C, const aclFloatArray*>) return 'F';
  if constexpr (std::is_same_v<C, const aclBoolArray*>) return 'B';
  if constexpr (std::is_same_v<C, const char*>) return 't';
  if constexpr (std::is_same_v<C, int64_t> || std::is_same_v<C, uint64_t>) return 'i';
  if constexpr (std::is_same_v<C, int32_t>) return 'n';
  if constexpr (std::is_same_v<C, int8_t>) return 'c';
  if constexpr (std::is_same_v<C, bool>) return 'b';
  if constexpr (std::is_same_v<C, double>) return 'd';
  if constexpr (std::is_same_v<C, float>) return 'f';
  return 0;
}

// Whether op-plugin calls the operator with these C types, as far as they are known.
constexpr bool is_called_with(std::string_view name, std::string_view kinds) {
  const auto* call = std::lower_bound(std::begin(kCalls), std::end(kCalls), name,
      [](const Call& each, std::string_view name) { return each.name < name; });
  if (call == std::end(kCalls) || call->name != name) return true;
  return std::equal(kinds.begin(), kinds.end(), call->kinds.begin(), call->kinds.end(),
      [](char ours, char theirs) { return ours == theirs || theirs == '?'; });
}

}  // namespace emu
