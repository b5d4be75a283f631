// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Dry run of an operator at the call. The body of a plain operator is ATen calls; what ATen refuses
// about dtypes and shapes would fail the stream, where CANN refuses the call. So the first time
// that a signature is seen (operator, dtypes, sizes and strides of the tensors, attributes without
// their values where these do not decide), the body runs on stand-ins: small tensors of ones, or of
// zeros where they are integers. What they refuse because they are smaller than the arguments, the
// body accepts on stand-ins of the arguments' sizes.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "tensor.h"

namespace emu {

class Signature {
 public:
  explicit Signature(const void* operation) : hash_(reinterpret_cast<uintptr_t>(operation)) {}
  void add(const at::Tensor& tensor);
  void add(const at::Scalar& scalar);
  void add(double value) { mix(std::isnan(value) ? 3 : (value > 0) - (value < 0) + 1); }
  // Seeds, offsets and sizes are unbounded: large values count as one.
  void add(int64_t value) {
    if (value >= kLarge) large_.push_back(value);
    mix(static_cast<uint64_t>(std::clamp<int64_t>(value, -kLarge, kLarge)));
  }
  void mix(uint64_t value) { hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15ull + (hash_ >> 29); }

  uint64_t hash() const { return hash_; }
  const c10::SmallVector<int64_t, 4>& large_attributes() const { return large_; }

 private:
  static constexpr int64_t kLarge = 64;
  uint64_t hash_;
  c10::SmallVector<int64_t, 4> large_;
};

// Makes the stand-ins of one call's tensors and attributes. Where the tensors are too large, sizes
// are cut: equal ones to equal ones, different ones to different ones, in the same order. So are
// attributes that are such a size.
class StandIns {
 public:
  StandIns() = default;  // of the arguments' sizes
  explicit StandIns(const std::vector<at::Tensor>& tensors);
  at::Tensor of(const at::Tensor& tensor) const;
  int64_t of(int64_t attribute) const;
  std::vector<int64_t> of(std::vector<int64_t> attributes) const;
  aclTensor* result() { return results_.emplace_back(std::make_unique<aclTensor>()).get(); }
  bool exact() const { return longest_ < 0; }

 private:
  int64_t cut(int64_t size) const;
  int64_t elements(const at::Tensor& tensor) const;

  int64_t longest_ = -1;         // larger sizes are cut
  std::vector<int64_t> larger_;  // these sizes, ascending
  std::vector<std::unique_ptr<aclTensor>> results_;
};

// Runs `body` on stand-ins if this signature did not pass before (a fixed number of them is
// remembered); throws what ATen says about the arguments, as an error of the call. An error about
// values does not count: the stand-ins have none.
void try_out(const Signature& signature, const std::vector<at::Tensor>& tensors,
    c10::function_ref<void(StandIns&)> body);

}  // namespace emu
