// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "checks.h"

#include <algorithm>

namespace emu {

void not_one_of(const char* argument, Printable found, const std::string& allowed) {
  raise(kOpParam, {argument, " is ", found, "; allowed: ", allowed});
}

void one_of(const char* argument, const at::Tensor& tensor, DTypes allowed) {
  const auto found = tensor.scalar_type();
  if (std::find(allowed.begin(), allowed.end(), found) == allowed.end())
    not_one_of(argument, found, listed(allowed));
}

void same_dtype(
    const char* argument, const at::Tensor& tensor, const char* other, const at::Tensor& like) {
  require(tensor.scalar_type() == like.scalar_type(), argument, " is ", tensor.scalar_type(),
      " and ", other, " is ", like.scalar_type(), "; they must be the same");
}

void rank(const char* argument, const at::Tensor& tensor, int64_t least, int64_t most) {
  require(tensor.dim() >= least && tensor.dim() <= most, argument, " has ", tensor.dim(),
      " dimensions; allowed: ", least, least == most ? "" : text(" to ", most));
}

void shape(const char* argument, const at::Tensor& tensor, at::IntArrayRef expected) {
  require(tensor.sizes() == expected, argument, " has shape ", tensor.sizes(), "; it must be ",
      expected);
}

void multiple(const char* argument, int64_t value, int64_t unit) {
  require(value % unit == 0, argument, " is ", value, "; it must be a multiple of ", unit);
}

void check_indices(
    const char* argument, const at::Tensor& indices, int64_t size, std::optional<int64_t> ignored) {
  const auto all = indices.reshape({-1}).to(at::kLong).contiguous();
  const auto* const value = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all.numel(); ++i)
    check((value[i] >= 0 && value[i] < size) || value[i] == ignored, kOpFailed, argument,
        " has the value ", value[i], " at position ", i, ", which is out of range; allowed: 0 to ",
        size - 1);
}

void with_index(const char* argument, const at::Tensor& indices, int64_t size,
    c10::function_ref<void()> run, std::optional<int64_t> ignored) {
  try {
    run();
  } catch (const std::exception&) {
    check_indices(argument, indices, size, ignored);
    throw;
  }
}

void contiguous(const char* argument, const at::Tensor& tensor) {
  require(tensor.is_contiguous(), argument, " has strides ", tensor.strides(), " for shape ",
      tensor.sizes(), "; it must be contiguous");
}

}  // namespace emu
