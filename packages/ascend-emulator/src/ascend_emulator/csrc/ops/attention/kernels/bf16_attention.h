// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// softmax(scale * q k^T) v of bfloat16 requests, whose keys and values are read in place: scores
// and sums in float32, an online softmax, weights in bfloat16 as ATen's flash attention has them.
#pragma once
#include <ATen/core/Tensor.h>

namespace emu::attention::kernels {

// Keys or values of a request: token t of group g is at base + blocks[t / block_size] *
// block_stride + (t % block_size) * stride
// + g * group_stride.
struct Rows {
  const at::BFloat16* base;
  const int32_t* blocks;  // null: all tokens are in one block
  int64_t block_size, block_stride, stride, group_stride;
};

struct Request {
  at::Tensor query, out, lse;  // [heads, queries, D] twice, [heads, queries] or undefined
  Rows key, value;
  int64_t keys;
  int64_t before = INT32_MAX,
          after = INT32_MAX;  // query i sees the keys from i - before to i + after
};

// Whether the CPU and these head sizes are supported.
bool has_attention(int64_t width, int64_t value_width);
void attend(const std::vector<Request>& requests, int64_t heads, int64_t groups, double scale);

}  // namespace emu::attention::kernels
