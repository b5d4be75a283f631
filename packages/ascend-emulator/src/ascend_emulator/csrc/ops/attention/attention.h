// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of the attention operators: masks, layouts, pages, and softmax(scale * q k^T + bias)
// v of one request.
#pragma once
#include "core/cost.h"
#include "operator/op.h"

// torch_npu calls this before a capture, for the maximum workspace of later updates.
#define MAX_WORKSPACE(NAME)           \
  RESOLVED(NAME##GetMaxWorkspaceSize, \
      emu::Operator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace)

namespace emu::attention {

constexpr int64_t kMaskSide = 2048;  // size of the compressed mask of the causal and band modes

// sparse_mode of torch_npu's documentation. Compressed masks hold no information: the mode defines
// the mask.
struct Sparse {
  int64_t mode = 0, before = INT64_MAX, after = INT64_MAX;
  Tensor mask;       // true: masked; may be undefined
  Ints prefix = {};  // modes 5 and 6: number of keys visible to all queries of a request
  bool mask_by_request = false;  // a two-dimensional mask is [requests, keys]
};

// A request's part of a mask that is given as a whole (modes 0 and 1), a view [queries, keys] or
// [heads, queries, keys].
Tensor mask_of_request(
    const Tensor& mask, bool by_request, int64_t request, int64_t queries, int64_t keys);

// Mask of a request, [queries, keys] or [heads, queries, keys], true: masked; undefined if nothing
// is masked.
Tensor masked_out(const Sparse& sparse, int64_t request, int64_t queries, int64_t keys);

struct Request {
  Tensor query, key, value;  // [heads, queries, D], [groups, keys, D], [groups, keys, DV]
  Tensor masked_out, bias,
      sink;  // each may be undefined; bias: added to the scaled scores; sink [heads]: added to the
             // softmax's sum
  double scale;
  Tensor drop = {};     // [heads, queries, keys], scaled dropout mask
  bool causal = false;  // instead of masked_out: query i sees keys 0 to i

  Tensor mask() const;  // masked_out, or the causal mask
};
void apply_sparse_mode(
    Request& request, const Sparse& sparse, int64_t index);  // sets masked_out or causal
// Bytes and FLOPs of a request, for the trace: of the mask, and of q k^T and the weighted sum of
// values for unmasked pairs.
void count_mask(const Sparse& sparse, int64_t queries, int64_t keys);
void count_products(const Tensor& query, int64_t keys, int64_t value_width,
    bool causal);  // query [heads, queries, D]
struct AttentionResult {
  Tensor out,
      lse;  // [heads, queries, DV], in float32 or the query's dtype; [heads, queries] float32
  Tensor most = {};  // attend_fp32: the largest score, [heads, queries]; lowest float32 value
                     // without visible keys
};
// A query without visible keys gives zeros and a log-sum-exp of +inf.
AttentionResult attend(const Request& request);
AttentionResult attend_fp32(const Request& request);  // computes in float32 for all dtypes

// Tokens [start, start + count) of a request as [heads, count, D], a view.
Tensor tokens(const Tensor& x, const std::string& layout, int64_t request, int64_t start,
    int64_t count, int64_t heads);
int64_t batch_of(const Tensor& x, const std::string& layout);
int64_t length_of(const Tensor& x, const std::string& layout);
inline bool packed(const std::string& layout) { return layout == "TND" || layout == "NTD"; }

// The first `length` tokens of a request's pages as [groups, length, D]. A page is [block_size, H],
// [groups, block_size, D] or, in fractal order, [groups, D / c, block_size, c].
void check_block(const Tensor& cache, int64_t block);  // of a block_table
Tensor pages(const Tensor& cache, const Tensor& table, int64_t request, int64_t length,
    int64_t groups, int64_t block_size);

// Length of a request from a list with one entry for all, or one per request (documentation of
// actual_seq_lengths).
int64_t entry(const Opt<Ints>& lengths, int64_t request, int64_t otherwise);

template <class... Absent> void refuse_given(const char* what, const Absent&... tensors) {
  require_emulated(
      (... && (!tensors.has_value() || tensors->numel() == 0)), what, " is not emulated");
}

}  // namespace emu::attention
