// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The fused inference attention: checks of its arguments, and the computation. Rules: see
// fused_infer_attention_score.cpp.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>

#include "antiquant.h"
#include "kernels/bf16_attention.h"

namespace emu::attention {

constexpr auto kTilingFailed =
    static_cast<Status>(561002);  // CANN's code where a kernel's tiling refuses the arguments

// input_layout to the query's and the output's, as op-plugin's
// FusedInferAttentionScoreKernelNpuOpApi.cpp lists them.
inline const std::map<std::string, std::pair<const char*, const char*>> kLayouts{
    {"BSH", {"BSH", "BSH"}}, {"BSND", {"BSND", "BSND"}}, {"BNSD", {"BNSD", "BNSD"}},
    {"TND", {"TND", "TND"}}, {"NTD", {"NTD", "NTD"}}, {"BNSD_BSND", {"BNSD", "BSND"}},
    {"BSH_BNSD", {"BSH", "BNSD"}}, {"BSND_BNSD", {"BSND", "BNSD"}}, {"NTD_TND", {"NTD", "TND"}},
    {"BSH_NBSD", {"BSH", "NBSD"}}, {"BSND_NBSD", {"BSND", "NBSD"}}, {"BNSD_NBSD", {"BNSD", "NBSD"}},
    {"TND_NTD", {"TND", "NTD"}}, {"NSD", {"NSD", "NSD"}}};

// Arguments of all versions. The FIELDS of a derived struct are those that an operator has, in
// order.
struct InferInputs {
  Tensor query;
  Tensors key, value;
  Opt<Tensor> pse, mask;
  Opt<Ints> query_lengths, kv_lengths;
  Opt<Tensor> dequant1, quant1, dequant2, out_scale, out_offset, both_scale, both_offset,
      block_table, query_padding, kv_padding, key_scale, key_offset, value_scale, value_offset,
      key_prefix, value_prefix;
  Opt<Ints> prefix_lengths;
  FIELDS(query, key, value, pse, mask, query_lengths, kv_lengths, dequant1, quant1, dequant2,
      out_scale, out_offset, both_scale, both_offset, block_table, query_padding, kv_padding,
      key_scale, key_offset, value_scale, value_offset, key_prefix, value_prefix, prefix_lengths)
};
struct InferRope {
  Opt<Tensor> query_rope, key_rope, rope_scale;
  FIELDS(query_rope, key_rope, rope_scale)
};
struct InferSettings {
  int64_t heads;
  double scale;
  int64_t before = INT64_MAX, after = INT64_MAX;
  Text layout;
  int64_t groups, sparse_mode = 0, inner_precise, block_size = 0, both_mode = 0;
  bool want_lse = false;
  int64_t key_mode = 0, value_mode = 0;
  FIELDS(heads, scale, before, after, layout, groups, sparse_mode, inner_precise, block_size,
      both_mode, want_lse, key_mode, value_mode)
};

struct FusedInfer : InferInputs, InferRope, InferSettings {
  Opt<Tensor> sink, query_scale;
  Antiquant key_quant, value_quant;
  Tensor out;
  Tensor lse;  // undefined if not requested

  std::string in, to;
  Tensor table;
  int64_t batch = -1, longest = 0, width = 0;
  struct Span {
    int64_t start, count, kv_start, kv_count;
  };
  std::vector<Span> spans;

  bool paged() const { return table.defined(); }
  bool latent() const { return query_rope.has_value(); }

  void check_dtypes() const;
  void check_quantized() const;
  void check_int8() const;
  void check_antiquant() const;
  void check_heads() const;
  void check_packed_heads() const;
  void check_lengths() const;
  void check_mask() const;

  int64_t value_width() const { return out.size(-1) / (to == "BSH" ? heads : 1); }

  void check_latent() const;
  void check_keys() const;
  void check_tokens() const;
  void check_pages() const;
  void check_chunks() const;
  void check_prefix() const;

  void plan() {
    const auto found = kLayouts.find(layout);
    require(found != kLayouts.end(), "input_layout is ", layout, "; allowed: ", [] {
      std::string all;
      for (const auto& [name, pair] : kLayouts) all += all.empty() ? name : ", " + name;
      return all;
    }());
    std::tie(in, to) = found->second;
    if (block_table && block_table->numel()) table = *block_table;
    require(!key.empty() && key.size() == value.size(), "lists of ", key.size(), " keys and ",
        value.size(), " values; they must be as long");
    width = query.size(-1) / (in == "BSH" ? heads : 1);
    if (packed(in)) {
      require(query_lengths && kv_lengths, "layout ", layout,
          " needs actual_seq_lengths and actual_seq_lengths_kv");
      require(key.size() == 1, "layout ", layout, " takes no list of keys");
      batch = query_lengths->size();
      longest = length_of(query, in);
      require(static_cast<int64_t>(kv_lengths->size()) >= batch, "actual_seq_lengths_kv has ",
          kv_lengths->size(), " entries for ", batch, " requests");
      require(batch == 0 || query_lengths->back() == longest, "actual_seq_lengths ends at ",
          batch ? query_lengths->back() : 0, ", query has ", longest, " tokens");
      for (int64_t i = 0; i < batch; ++i) {
        const int64_t start = i ? query_lengths->at(i - 1) : 0,
                      kv_start = i && !paged() ? kv_lengths->at(i - 1) : 0;
        spans.push_back(
            {start, query_lengths->at(i) - start, kv_start, kv_lengths->at(i) - kv_start});
      }
    } else {
      batch = batch_of(query, in);
      longest = length_of(query, in);
      require(key.size() == 1 || static_cast<int64_t>(key.size()) == batch, "a list of ",
          key.size(), " keys for ", batch, " requests");
      for (const auto& [name, lengths] : {std::pair{"actual_seq_lengths", &query_lengths},
               std::pair{"actual_seq_lengths_kv", &kv_lengths}})
        require(!*lengths || (*lengths)->empty() || (*lengths)->size() == 1 ||
                    static_cast<int64_t>((*lengths)->size()) >= batch,
            name, " has ", *lengths ? (*lengths)->size() : 0, " entries for ", batch,
            " requests; 1 or as many are allowed");
      for (int64_t i = 0; i < batch; ++i) {
        const auto& own = key.size() == 1 ? key[0] : key[i];
        const int64_t all = paged() ? 0 : length_of(own, in);
        spans.push_back(
            {0, longest == 1 ? 1 : entry(query_lengths, i, longest), 0, entry(kv_lengths, i, all)});
        require(paged() || spans.back().kv_count <= all, "actual_seq_lengths_kv of request ", i,
            " is ", spans.back().kv_count, " and key has ", all, " tokens");
        require(spans.back().count <= longest, "actual_seq_lengths of request ", i, " is ",
            spans.back().count, " and query has ", longest, " tokens");
      }
    }
    for (size_t i = 0; i < spans.size(); ++i) {
      require(spans[i].count >= 0 && spans[i].kv_count >= 0, "sequence lengths of request ", i,
          " decrease or are negative");
      if (paged())
        require(spans[i].kv_count <= table.size(1) * block_size, "request ", i, " has ",
            spans[i].kv_count, " tokens, its row of block_table ", table.size(1), " blocks");
      else if (packed(in))
        require(spans[i].kv_start + spans[i].kv_count <= length_of(key[0], in),
            "actual_seq_lengths_kv ends at ", spans[i].kv_start + spans[i].kv_count, ", key has ",
            length_of(key[0], in), " tokens");
    }
  }

  FusedInfer& checked() {
    groups = groups ? groups : heads;
    if (query.numel() == 0) return *this;
    rule("fused_infer.lengths", [&] { plan(); });
    require(static_cast<int64_t>(spans.size()) == batch, "the sequence lengths cannot be computed");
    rule("fused_infer.batch", [&] { within("the batch", batch, 0, 65536); });
    check_dtypes();
    check_heads();
    check_lengths();
    check_mask();
    if (paged()) rule("fused_infer_pages.cache", [&] { check_pages(); });
    if (paged()) check_chunks();
    check_latent();
    rule("fused_infer.key-shapes", [&] { check_keys(); });
    check_antiquant();
    rule("fused_infer.key-tokens", [&] { check_tokens(); });
    check_int8();
    if (key_prefix) rule("fused_infer_pages.prefix", [&] { check_prefix(); });
    return *this;
  }

  Tensor rows(const Tensor& cache, const Span& span, int64_t request, int64_t start) const {
    if (paged()) return pages(cache, table, request, span.kv_count, groups, block_size);
    return tokens(cache, in, packed(in) || cache.size(0) != 1 || in == "NSD" ? request : 0, start,
        span.kv_count, groups);
  }

  Sparse sparse_of_request() const {
    if (longest == 1 && !latent() && !packed(in) && sparse_mode >= 2) return {};
    Sparse sparse{sparse_mode, before, after, mask.value_or(Tensor()), {}, longest == 1};
    if (sparse_mode != 0 && sparse_mode != 4) sparse.before = sparse.after = INT64_MAX;
    return sparse;
  }

  // Whether kernels::attend() computes it: bfloat16 without anything that is added to or multiplied
  // with scores and results.
  bool is_plain() const {
    const bool masked = mask && sparse_mode < 2;
    return query.scalar_type() == at::kBFloat16 && key[0].scalar_type() == at::kBFloat16 &&
           out.scalar_type() == at::kBFloat16 && !latent() && !pse && !masked && !query_padding &&
           !kv_padding && !key_prefix && !sink && !out_scale && scale > 0 && key[0].dim() != 5 &&
           kernels::has_attention(width, value_width());
  }

  kernels::Rows rows_in_place(
      const Tensor& cache, const Span& span, int64_t request, int64_t head_size) const {
    const auto* base = cache.const_data_ptr<at::BFloat16>();
    if (!paged()) {
      const auto view = rows(cache, span, request, span.kv_start);
      return {view.const_data_ptr<at::BFloat16>(), nullptr, 0, 0, view.stride(1), view.stride(0)};
    }
    const auto* blocks = table.const_data_ptr<int32_t>() + request * table.size(1);
    for (int64_t i = 0; i * block_size < span.kv_count; ++i) check_block(cache, blocks[i]);
    cost::partial_access(
        cache, static_cast<double>(span.kv_count * groups * head_size * cache.element_size()));
    const bool by_group = cache.dim() == 4;
    return {base, blocks, block_size, cache.stride(0), cache.stride(by_group ? 2 : 1),
        by_group ? cache.stride(1) : head_size};
  }

  void run_plain() {
    const auto sparse = sparse_of_request();
    std::vector<kernels::Request> requests;
    for (int64_t i = 0; i < batch; ++i) {
      const auto& span = spans[i];
      if (!span.count) continue;
      const int64_t request = key.size() == 1 ? i : 0,
                    last = span.kv_count - span.count;  // last: the difference of positions
      const auto view = [&](const Tensor& x, const std::string& layout) {
        return tokens(x, layout, i, span.start, span.count, heads);
      };
      kernels::Request each{view(query, in), view(out, to),
          lse.defined() ? view(lse, lse_layout()).select(2, 0) : Tensor(),
          rows_in_place(key.size() == 1 ? key[0] : key[i], span, request, width),
          rows_in_place(value.size() == 1 ? value[0] : value[i], span, request, value_width()),
          span.kv_count};
      if (sparse.mode == 2) each.after = 0;
      if (sparse.mode == 3) each.after = last;
      if (sparse.mode == 4) {
        each.before = std::min<int64_t>(sparse.before, INT32_MAX) - last;
        each.after = std::min<int64_t>(sparse.after, INT32_MAX) + last;
      }
      count_mask(sparse, span.count, span.kv_count);
      count_products(each.query, span.kv_count, value_width(),
          sparse.mode == 2 || (sparse.mode == 3 && last == 0));
      requests.push_back(std::move(each));
    }
    kernels::attend(requests, heads, groups, scale);
  }

  std::string lse_layout() const { return packed(in) ? "TND" : "BNSD"; }

  void attend_to(int64_t i) {
    auto span = spans[i];
    int64_t kv_start = span.kv_start;
    // Left padding: start of the valid tokens (documentation, "query左padding" and "kv左padding").
    if (query_padding && query_lengths && longest > 1)
      span.start = longest - std::max<int64_t>(0, query_padding->item<int64_t>()) - span.count;
    const auto& own_key = key.size() == 1 ? key[0] : key[i];
    const auto& own_value = key.size() == 1 ? value[0] : value[i];
    if (kv_padding && kv_lengths)
      kv_start = length_of(own_key, in) - std::max<int64_t>(0, kv_padding->item<int64_t>()) -
                 span.kv_count;
    if (span.start < 0 || kv_start < 0) return;  // "the result is zeros"
    const bool whole = key.size() == 1;
    // With an int8 query the rope part is divided by both scales (golden function of op-plugin's
    // test_mla_prolog_v2.py), so the scales apply to both parts.
    auto k = query_scale ? rows(own_key, span, whole ? i : 0, kv_start).to(at::kFloat)
                         : key_quant(rows(own_key, span, whole ? i : 0, kv_start), i, groups, table,
                               block_size);
    auto v =
        value_quant(rows(own_value, span, whole ? i : 0, kv_start), i, groups, table, block_size);
    auto q = tokens(query, in, i, span.start, span.count, heads);
    if (latent()) {
      // Kernels read a latent once, for keys and values.
      cost::by_law("latent attention", static_cast<double>(v.nbytes()));
      q = at::concat({query_scale ? q.to(at::kFloat) : q,
                         tokens(*query_rope, in, i, span.start, span.count, heads)},
          -1);
      k = at::concat({k, rows(*key_rope, span, whole ? i : 0, kv_start)}, -1);
    }
    if (query_scale) {
      const std::string like = in == "BSH" ? "BSND" : in;
      q = q.to(at::kFloat) *
          tokens(query_scale->unsqueeze(-1), like, i, span.start, span.count, heads) *
          key_quant.scale.reshape({1, 1, 1});
    }
    if (key_prefix) {
      const int64_t length = entry(prefix_lengths, 0, length_of(*key_prefix, in));
      k = at::concat({tokens(*key_prefix, in, 0, 0, length, groups).to(k.scalar_type()), k}, 1);
      v = at::concat({tokens(*value_prefix, in, 0, 0, length, groups).to(v.scalar_type()), v}, 1);
    }
    const auto sparse = sparse_of_request();
    Request request{q, k, v, {}, {}, sink.value_or(Tensor()), scale};
    apply_sparse_mode(request, sparse, i);
    if (pse)
      request.bias = (*pse)[pse->size(0) == 1 ? 0 : i]
                         .narrow(1, 0, span.count)
                         .narrow(2, 0, k.size(1))
                         .to(at::kFloat);
    auto result = attend(request);
    if (out_scale) {
      const auto spread = [&](const Tensor& x) {
        return x.numel() == 1 ? x.to(at::kFloat).reshape({})
                              : x.to(at::kFloat).reshape({heads, 1, -1});
      };
      auto whole_numbers = result.out.to(at::kFloat) * spread(*out_scale);
      if (out_offset) whole_numbers.add_(spread(*out_offset));
      result.out = whole_numbers.round_().clamp_(-128, 127);
    }
    tokens(out, to, i, span.start, span.count, heads).copy_(result.out);
    if (lse.defined())
      tokens(lse, lse_layout(), i, span.start, span.count, heads).copy_(result.lse.unsqueeze(-1));
  }

  void run() {
    if (query.numel() == 0) return;
    if (!packed(in)) {
      const bool full = std::all_of(
          spans.begin(), spans.end(), [&](const Span& span) { return span.count == longest; });
      // Rows past a request's length: zeros, log-sum-exp +inf.
      if (!full) out.zero_();
      if (!full && lse.defined()) lse.fill_(std::numeric_limits<float>::infinity());
    }
    if (is_plain()) return run_plain();
    // Latents are key and value: two arguments in the count of bytes, of which parts are read.
    if (paged() && value[0].const_data_ptr() == key[0].const_data_ptr())
      cost::partial_access(&value, value[0].nbytes(), 0);
    // Parallel over requests, because single requests of a batch are small.
    auto* const counters = cost::current();
    at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
      const cost::Scope open(counters);
      at::AutoDispatchBelowADInplaceOrView kernels_only;
      for (int64_t i = first; i < last; ++i)
        if (spans[i].count) attend_to(i);
    });
  }
};

}  // namespace emu::attention
