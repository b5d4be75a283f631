// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Argument checks. Each error names the argument, the found value and the allowed ones; the
// operator's name is prepended at the C boundary. Write the source of the rule beside the check.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

#include "core/device.h"
#include "core/status.h"

namespace emu {

using DTypes = at::ArrayRef<at::ScalarType>;
inline constexpr at::ScalarType kFloatingList[] = {at::kFloat, at::kHalf, at::kBFloat16},
                                kIndexList[] = {at::kInt, at::kLong};
inline const DTypes kFloating(kFloatingList), kHalves(kFloatingList + 1, 2), kIndices(kIndexList);

// Throws kOpParam unless the arguments are as CANN documents them.
template <class... Parts>
[[gnu::always_inline]] inline void require(bool ok, const Parts&... parts) {
  check(ok, kOpParam, parts...);
}
template <class... Parts>
[[gnu::always_inline]] inline void require_emulated(bool ok, const Parts&... parts) {
  check_emulated(ok, kOpParam, parts...);
}
// The dtype is one of `allowed`.
void one_of(const char* argument, const at::Tensor& tensor, DTypes allowed);
[[noreturn]] void not_one_of(const char* argument, Printable found, const std::string& allowed);
template <class T>
void one_of(const char* argument, const T& value, std::initializer_list<T> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    not_one_of(argument, value, listed(allowed));
}
void same_dtype(
    const char* argument, const at::Tensor& tensor, const char* other, const at::Tensor& like);
// The number of dimensions lies in [least, most].
void rank(const char* argument, const at::Tensor& tensor, int64_t least, int64_t most);
inline void rank(const char* argument, const at::Tensor& tensor, int64_t exactly) {
  rank(argument, tensor, exactly, exactly);
}
void shape(const char* argument, const at::Tensor& tensor, at::IntArrayRef expected);
template <class T, class U>
void within(const char* argument, const T& value, const U& least, const U& most) {
  check(value >= least && value <= most, kOpParam, argument, " is ", value, "; allowed: ", least,
      " to ", most);
}
void multiple(const char* argument, int64_t value, int64_t unit);
void contiguous(const char* argument, const at::Tensor& tensor);
// Each index lies in [0, size), or is the value `ignored`.
void check_indices(const char* argument, const at::Tensor& indices, int64_t size,
    std::optional<int64_t> ignored = {});
// Runs a function of ATen that refuses other indices, with a message that lacks the index or the
// size.
void with_index(const char* argument, const at::Tensor& indices, int64_t size,
    c10::function_ref<void()> run, std::optional<int64_t> ignored = {});

}  // namespace emu
