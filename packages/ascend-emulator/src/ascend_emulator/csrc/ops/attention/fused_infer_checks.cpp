// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What the fused inference attention takes.
#include "fused_infer_attention.h"

namespace emu::attention {

void FusedInfer::check_dtypes() const {
  if (query_scale) return check_quantized();
  one_of("query", query, kHalves);
  for (const auto& [name, list] : {std::pair{"key", &key}, std::pair{"value", &value}})
    for (const auto& x : *list) {
      require(x.scalar_type() != at::kInt, name,
          " is int4 in int32; float16, bfloat16 and int8 are emulated");
      one_of(name, x, {at::kHalf, at::kBFloat16, at::kChar});
      require(x.scalar_type() == at::kChar || x.scalar_type() == query.scalar_type(), name, " is ",
          x.scalar_type(), " and query ", query.scalar_type(), "; they must be the same, or ", name,
          " int8");
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
void FusedInfer::check_quantized() const {
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

// Scales and offsets of int8 keys and values. A scale of both loses its first dimension before.
void FusedInfer::check_antiquant() const {
  if (key[0].scalar_type() != at::kChar || query_scale) return;
  int64_t length = paged() ? table.size(1) * block_size : 0;
  if (!paged())
    for (const auto& each : key) length = std::max(length, length_of(each, in));
  const auto check = [&](const char* name, const Tensor& x, int64_t mode, int64_t head_size) {
    const bool by_token = mode != 0 && mode != 2;
    one_of(name, x, {by_token ? at::kFloat : query.scalar_type()});
    const std::vector<Ints> shapes[] = {
        {{groups, 1, head_size}, {groups, head_size}, {groups * head_size}, {1}, {}},
        {{batch, length}}, {{groups}}, {{batch, groups, length}}, {{key[0].size(0), block_size}},
        {{key[0].size(0), groups, block_size}}};
    const auto fits = [&](const Ints& shape) {
      auto sizes = x.sizes();
      if (sizes.size() == shape.size() + 1 && sizes[0] == 1) sizes = sizes.slice(1);
      if (sizes == at::IntArrayRef(shape)) return true;
      // Tokens of pages may be more.
      return paged() && (mode == 1 || mode == 3) && sizes.size() == shape.size() &&
             sizes.slice(0, sizes.size() - 1) ==
                 at::IntArrayRef(shape).slice(0, shape.size() - 1) &&
             sizes.back() >= length;
    };
    const auto& allowed = shapes[mode];
    std::string all;
    for (const auto& each : allowed)
      if (!each.empty()) all += (all.empty() ? "" : " or ") + text(at::IntArrayRef(each));
    require(std::any_of(allowed.begin(), allowed.end(), fits), name, " has shape ", x.sizes(),
        "; with antiquant mode ", mode, " it must be ", all);
  };
  const auto check_both = [&](const char* scale, const char* offset, const Antiquant& factors,
                              int64_t head_size) {
    check(scale, factors.scale, factors.mode, head_size);
    if (factors.offset.defined()) check(offset, factors.offset, factors.mode, head_size);
  };
  check_both("the antiquant scale of key", "the antiquant offset of key", key_quant, width);
  check_both(
      "the antiquant scale of value", "the antiquant offset of value", value_quant, value_width());
}

void FusedInfer::check_heads() const {
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
    require(found == heads, "query has ", found, " heads in layout ", layout, " and num_heads is ",
        heads);
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
void FusedInfer::check_packed_heads() const {
  require(width <= 256, "the head size is ", width, " in layout ", layout,
      "; at most 256 without query_rope");
  const int64_t value = value_width();
  const bool known = (width == value && (width == 64 || width == 128 || width == 192)) ||
                     (width == 192 && value == 128);
  check(heads != groups || known, kTilingFailed, "When layout is ", in, ", queryD(", width,
      "), keyD(", width, ") and valueD(", value,
      ") must be same equal 192/128/64, or queryD and keyD equal 192 and valueD equal 128");
}

void FusedInfer::check_lengths() const {
  // "入参元素数量要小于等于4096", and for Q_S = 1 "S轴（KV）≤ 262144"
  require(!packed(in) || batch <= 4096, "actual_seq_lengths has ", batch, " entries in layout ",
      layout, "; at most 4096 are allowed");
  if (std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.count > 1; }))
    return;
  for (size_t i = 0; i < spans.size(); ++i)
    require(spans[i].kv_count <= 262144, "request ", i, " has ", spans[i].kv_count,
        " keys; at most 262144 are allowed with one query token");
}

void FusedInfer::check_mask() const {
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
    require(packed(in), "learnable_sink is supported in layouts TND and NTD_TND, not in ", layout);
    one_of("learnable_sink", *sink, {at::kBFloat16});
    shape("learnable_sink", *sink, {heads});
    require(value_width() <= 128, "the value's head size is ", value_width(),
        "; learnable_sink allows at most 128");
  }
}

void FusedInfer::check_latent() const {
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
    require(most <= 1 || sparse_mode == 3, "sparse_mode is ", sparse_mode, " with query_rope and ",
        most, " query tokens; it must be 3");
    one_of<int64_t>("block_size", block_size, {16, 128});
    require(key[0].dim() != 5 || (block_size == 128 && in != "BNSD"),
        "a fractal (NZ) cache needs block_size 128 and a layout other than BNSD");
  }
}

// Heads and head sizes of keys and values; a batch of one serves all requests.
void FusedInfer::check_keys() const {
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
void FusedInfer::check_tokens() const {
  for (size_t i = 0; i < key.size() && !paged(); ++i) {
    const auto keys = key[i].sizes().slice(0, key[i].dim() - 1);
    require(keys == value[i].sizes().slice(0, value[i].dim() - 1), "key has shape ", key[i].sizes(),
        " and value ", value[i].sizes(), "; only the last size may differ");
  }
}

void FusedInfer::check_pages() const {
  require(key.size() == 1, "a paged cache is one tensor, not a list of ", key.size());
  require(table.dim() == 2 && table.is_contiguous(), "block_table has shape ", table.sizes(),
      "; it must be contiguous and have two dimensions");
  one_of("block_table", table, {at::kInt});
  require(kv_lengths && !kv_lengths->empty(), "a paged cache needs actual_seq_lengths_kv");
  require(
      table.size(0) == batch, "block_table has ", table.size(0), " rows for ", batch, " requests");
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
    require(
        cache.size(2) <= 65535, "H of the cache is ", cache.size(2), "; at most 65535 is allowed");
  if (cache.dim() == 5)
    require(cache.size(4) == (small ? 32 : 16), "key has fractals of ", cache.size(4),
        "; it must be ", small ? 32 : 16);
  require(cache.numel() <= std::numeric_limits<int32_t>::max(), "key has ", cache.numel(),
      " elements; at most 2^31 - 1 are allowed");
}

}  // namespace emu::attention
