// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Dry run of an operator at the call. The body of a plain operator is ATen calls; what ATen refuses
// about dtypes and shapes would fail the stream, where CANN refuses the call. So the first time
// that a signature is seen (operator, dtypes, sizes and strides of the tensors, attributes without
// their values where these do not decide), the body runs on stand-ins: small tensors of ones, or of
// zeros where they are integers.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
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
    largest_ = std::max(largest_, value);
    mix(static_cast<uint64_t>(std::clamp<int64_t>(value, -kLarge, kLarge)));
  }
  void mix(uint64_t value) { hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15ull + (hash_ >> 29); }

  uint64_t hash() const { return hash_; }
  bool has_large_attribute() const { return largest_ >= kLarge; }

 private:
  static constexpr int64_t kLarge = 64;
  uint64_t hash_;
  int64_t largest_ = 0;
};

// Whether this signature passed a dry run before (a fixed number of them is remembered), and: it
// did.
bool passed_before(uint64_t signature);
void passed(uint64_t signature);

// Makes the stand-ins of one call's tensors. Where the tensors are too large, so are the stand-ins'
// sizes cut, equal ones to equal ones, and only errors about dtypes count.
class StandIns {
 public:
  explicit StandIns(const std::vector<at::Tensor>& tensors);
  at::Tensor of(const at::Tensor& tensor) const;
  aclTensor* result() { return results_.emplace_back(std::make_unique<aclTensor>()).get(); }
  bool exact() const { return longest_ < 0; }

 private:
  int64_t longest_ = -1;  // bound of sizes
  std::vector<std::unique_ptr<aclTensor>> results_;
};

// Runs `body`; throws what ATen says about the arguments, as an error of the call. An error about
// values does not count: the stand-ins have none.
void dry_run(const StandIns& stand_ins, c10::function_ref<void()> body);

}  // namespace emu
