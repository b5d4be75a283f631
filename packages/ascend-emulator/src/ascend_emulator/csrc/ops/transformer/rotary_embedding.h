// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Rotary embedding in float32.
#pragma once
#include "operator/op.h"

namespace emu {

Tensor rotated(const Tensor& x, bool interleaved);
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved);
// Even elements, then odd elements.
inline Tensor halves_of_pairs(const Tensor& x) {
  return x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
}

}  // namespace emu
