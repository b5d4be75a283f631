// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Sparse attention: the lightning indexer selects tokens, sparse flash attention attends to them.
// Rules: torch_npu's documentation of npu_lightning_indexer, npu_quant_lightning_indexer,
// npu_sparse_flash_attention and npu_kv_quant_sparse_flash_attention
// (torch_npu/_op_plugin_docs.py), op-plugin's pages, and the golden functions of its tests;
// argument order: op-plugin's call sites.
#include "attention.h"

namespace {

using namespace emu;
using namespace emu::attention;

// Ranges of each request's queries and keys. Lengths are tensors, so they are read in the
// computation.
struct Requests {
  std::string query_layout, key_layout;
  Opt<Tensor> query_lengths, key_lengths, table;

  struct Span {
    int64_t request, start, count, key_start, key_count;
  };
  std::vector<Span> spans(const Tensor& query, const Tensor& key) const {
    const bool varlen = query_layout == "TND";
    const auto numbers = [](const Opt<Tensor>& x) {
      return x ? x->to(at::kLong).contiguous() : Tensor();
    };
    const auto queries = numbers(query_lengths), keys = numbers(key_lengths);
    const int64_t batch = varlen ? queries.numel() : query.size(0);
    const auto at_place = [](const Tensor& x, int64_t i) { return x.const_data_ptr<int64_t>()[i]; };
    std::vector<Span> found;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t start = varlen && i ? at_place(queries, i - 1) : 0,
                    count = queries.defined() ? at_place(queries, i) - start : query.size(1);
      const int64_t key_start = key_layout == "TND" && i ? at_place(keys, i - 1) : 0,
                    key_count = keys.defined() ? at_place(keys, i) - key_start : key.size(1);
      rule("sparse_requests.lengths",
          count >= 0 && start + count <= query.size(varlen ? 0 : 1) && key_count >= 0 &&
              (!table || key_count <= table->size(1) * key.size(1)),
          "request ", i, " has ", count, " queries from ", start, " on and ", key_count, " keys");
      found.push_back({i, start, count, key_start, key_count});
    }
    return found;
  }

  // Queries [count, heads, D] and keys [length, D] of a request.
  Tensor queries(const Tensor& x, const Span& span) const {
    return (query_layout == "TND" ? x : x[span.request]).narrow(0, span.start, span.count);
  }
  Tensor keys(const Tensor& x, const Span& span) const {
    if (key_layout != "PA_BSND")
      return (key_layout == "TND" ? x : x[span.request])
          .narrow(0, span.key_start, span.key_count)
          .select(1, 0);
    return pages(x.flatten(2), *table, span.request, span.key_count, 1, x.size(1))[0];
  }
};

// Per query, the keys with the largest sum over heads of weight * relu(query * key); -1 if there
// are fewer visible keys.
struct Indexer {
  Requests requests;
  Tensor query, key, weights;
  Opt<Tensor> query_scale, key_scale;
  int64_t count, sparse_mode;
  Tensor out;
  Opt<Tensor> values;

  void run() {
    out.fill_(-1);
    const bool wants_values = values && values->numel();
    if (wants_values) values->zero_();
    for (const auto& span : requests.spans(query, key)) {
      if (!span.count || !span.key_count) continue;
      auto q = requests.queries(query, span).to(at::kFloat),
           k = requests.keys(key, span).to(at::kFloat);
      if (query_scale) {
        q = q * requests.queries(query_scale->unsqueeze(-1), span).to(at::kFloat);
        k = k * requests.keys(key_scale->unsqueeze(-1), span).to(at::kFloat);
      }
      const auto w = requests.queries(weights.unsqueeze(-1), span).to(at::kFloat);
      auto scores = at::empty({span.count, span.key_count}, at::kFloat);
      for (int64_t t = 0; t < span.count; ++t)
        scores[t].copy_((at::relu(at::matmul(q[t], k.t())) * w[t]).sum(0));
      if (sparse_mode == 3)
        scores.masked_fill_(
            at::arange(span.key_count).unsqueeze(0) - at::arange(span.count).unsqueeze(1) >
                span.key_count - span.count,
            -std::numeric_limits<float>::infinity());
      auto [sorted, places] = scores.sort(/*stable=*/true, -1, /*descending=*/true);
      const int64_t kept = std::min(count, span.key_count);
      const auto best = sorted.narrow(1, 0, kept);
      const auto unseen = best == -std::numeric_limits<float>::infinity();
      requests.queries(out, span)
          .select(1, 0)
          .narrow(1, 0, kept)
          .copy_(places.narrow(1, 0, kept).masked_fill(unseen, -1));
      if (wants_values)
        requests.queries(*values, span)
            .select(1, 0)
            .narrow(1, 0, kept)
            .copy_(best.masked_fill(unseen, 0));
    }
  }
};

// Bytes of a quantized key: int8 latents, rotated elements in the query's dtype, and a float32
// scale for each tile of latents.
constexpr int64_t kLatent = 512, kRope = 64, kTile = 128, kRopeEnd = kLatent + kRope * 2,
                  kTokenBytes = kRopeEnd + kLatent / kTile * 4;

// Quantized keys [tokens, kTokenBytes] as [tokens, kLatent + kRope] in the query's dtype.
Tensor dequantized(const Tensor& rows, at::ScalarType dtype) {
  const auto part = [&](int64_t start, int64_t end) {
    return rows.narrow(-1, start, end - start).contiguous();
  };
  const auto tiles = part(0, kLatent).to(at::kFloat).view({-1, kLatent / kTile, kTile}),
             scales = part(kRopeEnd, kTokenBytes).view(at::kFloat).unsqueeze(-1);
  return at::concat(
      {(tiles * scales).flatten(1).to(dtype), part(kLatent, kRopeEnd).view(dtype)}, -1);
}

// Each query attends to the token blocks of its indices, up to the first -1. Without the ropes,
// the query's are its last elements, and keys are quantized; the values are their latents.
struct SparseAttention {
  Requests requests;
  Tensor query, key, value, indices;
  Opt<Tensor> query_rope, key_rope, sinks;
  double scale;
  int64_t block, sparse_mode;
  Tensor out;
  Opt<Tensor> most, sum;

  void run() {
    out.zero_();
    int64_t read = 0;  // tokens: those of each query are gathered separately
    for (const auto& span : requests.spans(query, key)) {
      if (!span.count) continue;
      auto q = requests.queries(query, span);
      if (query_rope) q = at::concat({q, requests.queries(*query_rope, span)}, -1);
      Tensor k, v;
      {
        const cost::Scope uncounted(nullptr);
        k = requests.keys(key, span);
        if (key_rope) {
          k = at::concat({k, requests.keys(*key_rope, span)}, -1);
          v = requests.keys(value, span);
        } else {
          k = dequantized(k, query.scalar_type());
          v = k.narrow(-1, 0, kLatent);
        }
      }
      const auto named = requests.queries(indices, span).select(1, 0).contiguous();
      const auto target = requests.queries(out, span);
      for (int64_t t = 0; t < span.count; ++t) {
        const auto* first = named.const_data_ptr<int32_t>() + t * named.size(1);
        const int64_t end = sparse_mode == 3
                                ? std::min(span.key_count, span.key_count - span.count + t + 1)
                                : span.key_count;
        Ints seen;
        for (int64_t i = 0; i < named.size(1) && first[i] >= 0; ++i)
          for (int64_t place = first[i] * block; place < std::min((first[i] + 1) * block, end);
              ++place)
            seen.push_back(place);
        read += static_cast<int64_t>(seen.size());
        const auto where = at::tensor(seen, at::kLong);
        Request request{q[t].unsqueeze(1), k.index_select(0, where).unsqueeze(0),
            v.index_select(0, where).unsqueeze(0), {}, {}, sinks.value_or(Tensor()), scale};
        const auto result = seen.empty() ? attend(request) : attend_fp32(request);
        target[t].copy_(result.out.squeeze(1));
        if (!most || !most->numel()) continue;
        const auto put = [&](const Tensor& into,
                             const Tensor& x) {  // [1, T, heads], or [B, 1, S, heads]
          (requests.query_layout == "TND" ? into[0][span.start + t] : into[span.request][0][t])
              .copy_(x);
        };
        const auto largest =
            seen.empty() ? at::full({q.size(1)}, std::numeric_limits<float>::lowest(), at::kFloat)
                         : result.most.squeeze(1);
        put(*most, largest);
        put(*sum, seen.empty() ? at::zeros({q.size(1)}, at::kFloat)
                               : (result.lse.squeeze(1) - largest).exp());
      }
    }
    const auto bytes = [&](const Tensor& x, int64_t width) {
      return static_cast<double>(read * width * x.element_size());
    };
    cost::partial_access(key, bytes(key, key.size(-1)));
    if (key_rope) cost::partial_access(*key_rope, bytes(*key_rope, key_rope->size(-1)));
    cost::partial_access(&value, value.nbytes(),
        bytes(value, kLatent));  // two arguments with one address: latents are key and value
  }
};

template <class Operator> Computation run(Operator op) {
  return [op = std::move(op)]() mutable { op.run(); };
}

}  // namespace

CHECKED(aclnnLightningIndexer,
    (Tensor query, Tensor key, Tensor weights, Opt<Tensor> query_lengths, Opt<Tensor> key_lengths,
        Opt<Tensor> table, Text query_layout, Text key_layout, int64_t count, int64_t sparse_mode,
        int64_t before, int64_t after, bool, Tensor out, Opt<Tensor> values),
    {
      return run(Indexer{{query_layout, key_layout, query_lengths, key_lengths, table}, query, key,
          weights, {}, {}, count, sparse_mode, out, values});
    })
CHECKED(aclnnQuantLightningIndexer,
    (Tensor query, Tensor key, Tensor weights, Tensor query_scale, Tensor key_scale,
        Opt<Tensor> query_lengths, Opt<Tensor> key_lengths, Opt<Tensor> table, int64_t query_mode,
        int64_t key_mode, Text query_layout, Text key_layout, int64_t count, int64_t sparse_mode,
        int64_t before, int64_t after, Tensor out),
    {
      return run(Indexer{{query_layout, key_layout, query_lengths, key_lengths, table}, query, key,
          weights, query_scale, key_scale, count, sparse_mode, out, {}});
    })
namespace {
struct SparseInputs {
  Tensor query, key, value, indices;
  Opt<Tensor> table, query_lengths, key_lengths, query_rope, key_rope;
  FIELDS(query, key, value, indices, table, query_lengths, key_lengths, query_rope, key_rope)
};
struct SparseSettings {
  double scale;
  int64_t block;
  Text query_layout, key_layout;
  int64_t sparse_mode, before, after, attention_mode;
  bool with_lse;
  Tensor out;
  Opt<Tensor> most, sum;
  FIELDS(scale, block, query_layout, key_layout, sparse_mode, before, after, attention_mode,
      with_lse, out, most, sum)
};
Computation sparse(const SparseInputs& in, const Opt<Tensor>& sinks, const SparseSettings& to) {
  rule("sparse_attention.block-of-pages", !in.table || in.key.size(1) % to.block == 0,
      "sparse_block_size ", to.block, " does not divide the block size ", in.key.size(1));
  return run(
      SparseAttention{{to.query_layout, to.key_layout, in.query_lengths, in.key_lengths, in.table},
          in.query, in.key, in.value, in.indices, in.query_rope, in.key_rope, sinks, to.scale,
          to.block, to.sparse_mode, to.out, to.most, to.sum});
}
}  // namespace
CHECKED(aclnnSparseFlashAttention, (SparseInputs in, SparseSettings settings),
    { return sparse(in, {}, settings); })
CHECKED(aclnnSparseFlashAttentionV2, (SparseInputs in, Opt<Tensor> sinks, SparseSettings settings),
    { return sparse(in, sinks, settings); })
namespace {
struct QuantizedInputs {
  Tensor query, key, value, indices;
  Opt<Tensor> key_dequant_scale, value_dequant_scale, table, query_lengths, key_lengths;
  FIELDS(query, key, value, indices, key_dequant_scale, value_dequant_scale, table, query_lengths,
      key_lengths)
};
struct QuantizedSettings {
  double scale;
  int64_t key_mode, value_mode, block;
  Text query_layout, key_layout;
  int64_t sparse_mode, before, after, attention_mode, scale_mode, tile_size, rope_head_dim;
  Tensor out;
  FIELDS(scale, key_mode, value_mode, block, query_layout, key_layout, sparse_mode, before, after,
      attention_mode, scale_mode, tile_size, rope_head_dim, out)
};
}  // namespace
CHECKED(aclnnKvQuantSparseFlashAttention, (QuantizedInputs in, QuantizedSettings to), {
  require_emulated(in.key.scalar_type() == at::kChar, "key in ", in.key.scalar_type());
  rule("quantized_sparse_attention.block-of-pages", !in.table || in.key.size(1) % to.block == 0,
      "sparse_block_size ", to.block, " does not divide the block size ", in.key.size(1));
  return run(
      SparseAttention{{to.query_layout, to.key_layout, in.query_lengths, in.key_lengths, in.table},
          in.query, in.key, in.value, in.indices, {}, {}, {}, to.scale, to.block, to.sparse_mode,
          to.out, {}, {}});
})
