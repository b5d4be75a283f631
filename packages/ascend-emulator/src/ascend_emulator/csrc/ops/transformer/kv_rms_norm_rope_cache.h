// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Fused RMSNorm, rotary embedding and write to a paged KV cache.
#pragma once
#include "ops/normalization/normalization.h"
#include "rotary_embedding.h"

namespace emu {

enum class Places {
  sequence,
  slots,
  pages
};  // meaning of the index: position in a sequence, slot of a token, or page
struct CacheMode {
  Places places;
  bool fractal;
};

CacheMode mode_of(const Text& name, std::initializer_list<Text> allowed);
Tensor rms_normed(const Tensor& x, const Tensor& gamma, double epsilon);  // float32
Tensor stored(const Tensor& x, const Tensor& cache, const Opt<Tensor>& scale,
    const Opt<Tensor>& offset, bool divides);
void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& index, CacheMode mode);

}  // namespace emu
