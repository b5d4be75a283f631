// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The fused inference attention: checks of its arguments, and the computation. Rules: see
// fused_infer_attention_score.cpp.
#ifndef ASCEND_EMULATOR_OPS_ATTENTION_FUSED_INFER_ATTENTION_H
#define ASCEND_EMULATOR_OPS_ATTENTION_FUSED_INFER_ATTENTION_H
#include <ATen/Parallel.h>
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
    {"BSH", {"BSH", "BSH"}},
    {"BSND", {"BSND", "BSND"}},
    {"BNSD", {"BNSD", "BNSD"}},
    {"TND", {"TND", "TND"}},
    {"NTD", {"NTD", "NTD"}},
    {"BNSD_BSND", {"BNSD", "BSND"}},
    {"BSH_BNSD", {"BSH", "BNSD"}},
    {"BSND_BNSD", {"BSND", "BNSD"}},
    {"NTD_TND", {"NTD", "TND"}},
    {"BSH_NBSD", {"BSH", "NBSD"}},
    {"BSND_NBSD", {"BSND", "NBSD"}},
    {"BNSD_NBSD", {"BNSD", "NBSD"}},
    {"TND_NTD", {"TND", "NTD"}},
    {"NSD", {"NSD", "NSD"}},
};

struct FusedInfer {
  Tensor query;
  Tensors key, value;
  Opt<Tensor> pse, mask;
  Opt<Ints> query_lengths, kv_lengths;
  Opt<Tensor> block_table, query_padding, kv_padding, key_prefix, value_prefix;
  Opt<Ints> prefix_lengths;
  Opt<Tensor> query_rope, key_rope, sink, query_scale;
  Antiquant key_quant, value_quant;
  Opt<Tensor> out_scale, out_offset;
  int64_t heads, groups, block_size;
  double scale;
  int64_t before, after;
  Text layout;
  int64_t sparse_mode, inner_precise;
  Tensor out;
  Tensor lse;  // undefined if not requested

  std::string in, to;
  Tensor table;
  int64_t batch = 0, longest = 0, width = 0;
  struct Span {
    int64_t start, count, kv_start, kv_count;
  };
  std::vector<Span> spans;

  bool paged() const { return table.defined(); }
  bool latent() const { return query_rope.has_value(); }

  void check_dtypes() const {
    if (query_scale) return check_quantized();
    one_of("query", query, kHalves);
    for (const auto& [name, list] : {std::pair{"key", &key}, std::pair{"value", &value}})
      for (const auto& x : *list) {
        require(x.scalar_type() != at::kInt, name,
            " is int4 in int32; float16, bfloat16 and int8 are emulated");
        one_of(name, x, {at::kHalf, at::kBFloat16, at::kChar});
        require(x.scalar_type() == at::kChar || x.scalar_type() == query.scalar_type(), name,
            " is ", x.scalar_type(), " and query ", query.scalar_type(),
            "; they must be the same, or ", name, " int8");
        contiguous(name, x);
      }
    same_dtype("value", value[0], "key", key[0]);
    if (key_rope) contiguous("key_rope", *key_rope);
    // All of them are documented to be contiguous. Of query the last dimension only: vllm-ascend
    // 0.27.1rc1, validated on hardware, always passes the slice prefill_q[..., :qk_nope_head_dim]
    // to the prefill of latent attention, and makes key, value and key_rope contiguous.
    for (const auto& [name, x] :
        {std::pair{"query", &query}, std::pair{"query_rope", query_rope ? &*query_rope : &query}})
      require(x->stride(-1) == 1 || x->size(-1) == 1, name, " has strides ", x->strides(),
          " for shape ", x->sizes(), "; its last dimension must be contiguous");
    const bool small = key[0].scalar_type() == at::kChar;
    require(!small || (key_quant.scale.defined() && value_quant.scale.defined()),
        "key and value are int8; antiquant_scale, or key_antiquant_scale and "
        "value_antiquant_scale, must be given");
    require(small || !key_quant.scale.defined(), "an antiquant scale is given and key is ",
        key[0].scalar_type(), "; it must be int8");
    if (small) within("key_antiquant_mode", key_quant.mode, 0, 5);
    require(key_quant.offset.defined() == value_quant.offset.defined(),
        "the antiquant offsets of key and value must be given together");
    require(key_quant.mode == value_quant.mode || (key_quant.mode == 0 && value_quant.mode == 1),
        "key_antiquant_mode ", key_quant.mode, " and value_antiquant_mode ", value_quant.mode,
        "; they must be the same, or 0 and 1");
    if (mask) one_of("atten_mask", *mask, {at::kBool, at::kChar, at::kByte});
    for (const auto& [name, x] : {std::pair{"atten_mask", &mask}, std::pair{"pse_shift", &pse},
             std::pair{"key_shared_prefix", &key_prefix},
             std::pair{"value_shared_prefix", &value_prefix}})
      if (*x) contiguous(name, **x);
    if (out_scale)
      one_of("quant_scale2", *out_scale,
          query.scalar_type() == at::kBFloat16 ? DTypes{at::kFloat, at::kBFloat16}
                                               : DTypes{at::kFloat});
    require(!out_offset || out_scale, "quant_offset2 is given without quant_scale2");
    if (pse) same_dtype("pse_shift", *pse, "query", query);
  }

  // int8 query, key and value with bfloat16 rope parts: documentation of
  // npu_fused_infer_attention_score_v2, where query_rope is given.
  void check_quantized() const {
    require(latent(), "dequant_scale_query is given without query_rope");
    one_of("query", query, {at::kChar});
    one_of("key", key[0], {at::kChar});
    one_of("value", value[0], {at::kChar});
    one_of("query_rope", *query_rope, {at::kBFloat16});
    one_of("dequant_scale_query", *query_scale, {at::kFloat});
    require(query_scale->numel() == query.numel() / width, "dequant_scale_query has shape ",
        query_scale->sizes(), "; one for each token and head is expected");
    require(key_quant.scale.defined() && value_quant.scale.defined() &&
                key_quant.scale.numel() == 1 && value_quant.scale.numel() == 1,
        "dequant_scale_key and dequant_scale_value must be given, of one element each");
    require(!key_quant.offset.defined() && !value_quant.offset.defined() && !out_scale,
        "an int8 query goes with no offsets and no quant_scale_out");
  }

  void check_heads() const {
    require(heads % groups == 0 && heads / groups <= 64, heads, " heads over ", groups,
        " key-value heads; a multiple of at most 64 is allowed");
    within("num_heads", heads, 1, 256);
    within("the head size", width, 1, 512);
    multiple("the head size", width, key[0].scalar_type() == at::kChar ? 32 : 16);
    if (!latent() && packed(in)) check_packed_heads();
    if (longest > 1 && (in == "BSH" || in == "BSND"))
      require(heads * width < 65535, "heads x head size is ", heads * width, " in layout ", layout,
          "; it must be below 65535");
    if (in == "BSND" || in == "BNSD" || in == "TND" || in == "NTD") {
      const int64_t found = query.size(in == "BSND" ? 2 : in == "NTD" ? 0 : 1);
      require(found == heads, "query has ", found, " heads in layout ", layout,
          " and num_heads is ", heads);
    }
    require(layout != "BNSD_BSND" || longest > 1,
        "layout BNSD_BSND is for queries of more than one token");
    // Bit 0, high performance, affects float16 only, and what it rounds is not documented: computed
    // with high precision. Bit 1, correction of fully masked rows, is always on;
    // "Q_S为1时该参数仅支持取0和1".
    within("inner_precise", inner_precise, 0, longest == 1 && !packed(in) ? 1 : 3);
    within("sparse_mode", sparse_mode, 0, 4);
  }

  // op-plugin's page of npu_fused_infer_attention_score_v2 has 64, 128, and 192 with values of 128
  // for multi-head attention; the text and the values of 192 are those of hardware (vllm-ascend,
  // issue 4020 and pull request 9632). Grouped queries of other sizes: docs/emulator-strictness.md,
  // "Reviewed and kept".
  void check_packed_heads() const {
    require(width <= 256, "the head size is ", width, " in layout ", layout,
        "; at most 256 without query_rope");
    const int64_t value = value_width();
    const bool known = (width == value && (width == 64 || width == 128 || width == 192)) ||
                       (width == 192 && value == 128);
    check(heads != groups || known, kTilingFailed, "When layout is ", in, ", queryD(", width,
        "), keyD(", width, ") and valueD(", value,
        ") must be same equal 192/128/64, or queryD and keyD equal 192 and valueD equal 128");
  }

  void check_lengths() const {
    // "入参元素数量要小于等于4096", and for Q_S = 1 "S轴（KV）≤ 262144"
    require(!packed(in) || batch <= 4096, "actual_seq_lengths has ", batch, " entries in layout ",
        layout, "; at most 4096 are allowed");
    if (std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.count > 1; }))
      return;
    for (size_t i = 0; i < spans.size(); ++i)
      require(spans[i].kv_count <= 262144, "request ", i, " has ", spans[i].kv_count,
          " keys; at most 262144 are allowed with one query token");
  }

  void check_mask() const {
    const bool ignored =
        longest == 1 && !latent() &&
        !packed(in);  // "sparse_mode has no effect when Q_S is 1 and there is no rope"
    if (sparse_mode >= 2 && !ignored) {
      require(mask.has_value(), "sparse_mode ", sparse_mode, " needs atten_mask");
      require(mask->size(-1) == kMaskSide && mask->size(-2) == kMaskSide &&
                  mask->numel() == kMaskSide * kMaskSide,
          "sparse_mode ", sparse_mode, " needs an atten_mask of 2048 x 2048, not ", mask->sizes());
    }
    require(sparse_mode != 1 || mask, "sparse_mode 1 needs atten_mask");
    int64_t keys = 0;  // of the longest request
    for (const auto& span : spans) keys = std::max(keys, span.kv_count);
    if (key_prefix) keys += entry(prefix_lengths, 0, length_of(*key_prefix, in));
    if (mask && sparse_mode < 2)
      for (const int64_t i : {int64_t{0}, batch - 1})
        mask_of_request(*mask, longest == 1, i, longest, keys);
    require(!packed(in) || sparse_mode > 1 || !mask, "layout ", layout,
        " takes atten_mask with sparse_mode 3 and 4 only, not ", sparse_mode);
    if (pse) {
      require(!packed(in), "pse_shift is not supported in layout ", layout);
      require(pse->dim() == 4 && (pse->size(0) == 1 || pse->size(0) == batch) &&
                  pse->size(1) == heads && pse->size(2) >= longest && pse->size(3) >= keys,
          "pse_shift has shape ", pse->sizes(), "; it must be [1 or ", batch, ", ", heads, ", ",
          longest, ", ", keys, "], or larger in the last two");
    }
    if (sink) {
      require(
          packed(in), "learnable_sink is supported in layouts TND and NTD_TND, not in ", layout);
      one_of("learnable_sink", *sink, {at::kBFloat16});
      shape("learnable_sink", *sink, {heads});
      require(value_width() <= 128, "the value's head size is ", value_width(),
          "; learnable_sink allows at most 128");
    }
  }

  int64_t value_width() const { return out.size(-1) / (to == "BSH" ? heads : 1); }

  void check_latent() const {
    require(query_rope.has_value() == key_rope.has_value(),
        "query_rope and key_rope must be given together");
    if (!latent()) return;
    if (!query_scale) same_dtype("query_rope", *query_rope, "query", query);
    same_dtype("key_rope", *key_rope, "query_rope", *query_rope);
    require(width == 512 || width == 128, "the head size is ", width,
        " with query_rope; 512 and 128 are allowed");
    require(query_rope->numel() == query.numel() / width * 64, "query_rope has shape ",
        query_rope->sizes(), "; it must be that of query with a last dimension of 64 per head");
    require(!pse && !key_prefix && !out_scale && !query_padding && !kv_padding,
        "query_rope goes with no pse_shift, prefix, quant_scale2 or left padding");
    if (width == 128) {
      require(packed(in) && !paged(),
          "head size 128 with query_rope is supported in layouts TND and NTD_TND without a "
          "block_table");
      return;
    }
    require(groups == 1, "num_key_value_heads is ", groups,
        " with query_rope and head size 512; it must be 1");
    require((heads & (heads - 1)) == 0 && heads <= 128, "num_heads is ", heads,
        " with query_rope; 1, 2, 4, 8, 16, 32, 64 and 128 are allowed");
    require(paged() || sparse_mode == 4, "query_rope with head size 512 needs a block_table");
    if (sparse_mode != 4) {
      int64_t most = longest;
      if (packed(in)) {
        most = 0;
        for (const auto& span : spans) most = std::max(most, span.count);
      }
      require(most <= 16, "a request has ", most,
          " query tokens with query_rope; at most 16 are allowed");
      // "Q_S大于1时只支持sparse=3且传入mask"
      require(most <= 1 || sparse_mode == 3, "sparse_mode is ", sparse_mode,
          " with query_rope and ", most, " query tokens; it must be 3");
      one_of<int64_t>("block_size", block_size, {16, 128});
      require(key[0].dim() != 5 || (block_size == 128 && in != "BNSD"),
          "a fractal (NZ) cache needs block_size 128 and a layout other than BNSD");
    }
  }

  // Heads and head sizes of keys and values; a batch of one serves all requests.
  void check_keys() const {
    const int64_t head = in == "BSND" ? 2 : in == "NTD" || in == "NSD" ? 0 : 1;
    for (const auto& [name, list, size] :
        {std::tuple{"key", &key, width}, std::tuple{"value", &value, value_width()}})
      for (const auto& x : *list) {
        const bool fits =
            paged()       ? x.numel() == x.size(0) * block_size * groups * size
            : in == "BSH" ? x.dim() == 3 && x.size(2) == groups * size
                          : x.dim() == query.dim() && x.size(head) == groups && x.size(-1) == size;
        require(fits && (paged() || packed(in) || in == "NSD" || x.size(0) == 1 ||
                            (list->size() == 1 && x.size(0) == batch)),
            name, " has shape ", x.sizes(), " in layout ", layout, " for ", batch, " requests, ",
            groups, " key-value heads and a head size of ", size);
      }
  }

  // Without pages keys and values have the same tokens.
  void check_tokens() const {
    for (size_t i = 0; i < key.size() && !paged(); ++i) {
      const auto keys = key[i].sizes().slice(0, key[i].dim() - 1);
      require(keys == value[i].sizes().slice(0, value[i].dim() - 1), "key has shape ",
          key[i].sizes(), " and value ", value[i].sizes(), "; only the last size may differ");
    }
  }

  void check_pages() const {
    require(key.size() == 1, "a paged cache is one tensor, not a list of ", key.size());
    require(table.dim() == 2 && table.is_contiguous(), "block_table has shape ", table.sizes(),
        "; it must be contiguous and have two dimensions");
    one_of("block_table", table, {at::kInt});
    require(kv_lengths && !kv_lengths->empty(), "a paged cache needs actual_seq_lengths_kv");
    require(table.size(0) == batch, "block_table has ", table.size(0), " rows for ", batch,
        " requests");
    require(!query_padding && !kv_padding && !key_prefix,
        "a paged cache goes with no left padding and no shared prefix");
    within("block_size", block_size, 16, 512);
    const bool small = key[0].scalar_type() == at::kChar;
    multiple("block_size", block_size, small ? 32 : 16);
    if (longest > 1 && !latent() && !packed(in) && !small)
      multiple("block_size, for queries of more than one token,", block_size, 128);
    const auto& cache = key[0];
    require(cache.dim() == 3 || cache.dim() == 5 ||
                (cache.dim() == 4 && in != "BSH" && in != "BSND") || (cache.dim() == 4 && latent()),
        "key has shape ", cache.sizes(),
        "; a paged cache is [blocks, block_size, H], for BNSD and TND also [blocks, KV_N, "
        "block_size, D], or [blocks, KV_N, D / "
        "c, block_size, c]");
    const int64_t found = cache.size(cache.dim() == 3 ? 1 : cache.dim() - 2);
    require(
        found == block_size, "key has blocks of ", found, " tokens and block_size is ", block_size);
    if (cache.dim() == 3)
      require(cache.size(2) <= 65535, "H of the cache is ", cache.size(2),
          "; at most 65535 is allowed");
    if (cache.dim() == 5)
      require(cache.size(4) == (small ? 32 : 16), "key has fractals of ", cache.size(4),
          "; it must be ", small ? 32 : 16);
    require(cache.numel() <= std::numeric_limits<int32_t>::max(), "key has ", cache.numel(),
        " elements; at most 2^31 - 1 are allowed");
  }

  void plan() {
    const auto found = kLayouts.find(layout);
    require(found != kLayouts.end(), "input_layout is ", layout, "; allowed: ", [] {
      Ints none;
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
      within("the batch", batch, 0, 65536);
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
    require(heads > 0, "num_heads is ", heads, "; it must be positive");
    if (query.numel() == 0) return *this;
    plan();
    check_dtypes();
    check_heads();
    check_lengths();
    check_mask();
    if (paged()) check_pages();
    check_latent();
    check_keys();
    check_tokens();
    if (key_prefix)
      require(value_prefix && key_prefix->size(0) == 1 && !packed(in),
          "a shared prefix has a batch of 1, a key and a value, and no packed layout");
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
      q = at::cat({query_scale ? q.to(at::kFloat) : q,
                      tokens(*query_rope, in, i, span.start, span.count, heads)},
          -1);
      k = at::cat({k, rows(*key_rope, span, whole ? i : 0, kv_start)}, -1);
    }
    if (query_scale) {
      const std::string like = in == "BSH" ? "BSND" : in;
      q = q.to(at::kFloat) *
          tokens(query_scale->unsqueeze(-1), like, i, span.start, span.count, heads) *
          key_quant.scale.reshape({1, 1, 1});
    }
    if (key_prefix) {
      const int64_t length = entry(prefix_lengths, 0, length_of(*key_prefix, in));
      k = at::cat({tokens(*key_prefix, in, 0, 0, length, groups).to(k.scalar_type()), k}, 1);
      v = at::cat({tokens(*value_prefix, in, 0, 0, length, groups).to(v.scalar_type()), v}, 1);
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

#endif  // ASCEND_EMULATOR_OPS_ATTENTION_FUSED_INFER_ATTENTION_H
