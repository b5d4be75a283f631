// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What the fused inference attention takes.
#include "fused_infer_attention.h"

namespace emu::attention {

void FusedInfer::check_dtypes() const {
  // All of them are documented to be contiguous. Of query the last dimension only: vllm-ascend
  // 0.27.1rc1, validated on hardware, always passes the slice prefill_q[..., :qk_nope_head_dim]
  // to the prefill of latent attention, and makes key, value and key_rope contiguous.
  rule("fused_infer.query-contiguous", [&] {
    for (const auto& [name, x] :
        {std::pair{"query", &query}, std::pair{"query_rope", query_rope ? &*query_rope : &query}})
      require(x->stride(-1) == 1 || x->size(-1) == 1, name, " has strides ", x->strides(),
          " for shape ", x->sizes(), "; its last dimension must be contiguous");
  });
  if (query_scale) return check_quantized();
  const bool small = key[0].scalar_type() == at::kChar;
  rule("fused_infer_int8.scales", [&] {
    require(!small || (key_quant.scale.defined() && value_quant.scale.defined()),
        "key and value are int8; antiquant_scale, or key_antiquant_scale and "
        "value_antiquant_scale, must be given");
    require(small || !key_quant.scale.defined(), "an antiquant scale is given and key is ",
        key[0].scalar_type(), "; it must be int8");
    require(key_quant.offset.defined() == value_quant.offset.defined(),
        "the antiquant offsets of key and value must be given together");
  });
  rule("fused_infer_int8.modes", [&] {
    if (small) within("key_antiquant_mode", key_quant.mode, 0, 5);
    if (key_quant.mode == value_quant.mode) return;
    require(key_quant.mode == 0 && value_quant.mode == 1, "key_antiquant_mode ", key_quant.mode,
        " and value_antiquant_mode ", value_quant.mode, "; they must be the same, or 0 and 1");
    one_of("query, for key_antiquant_mode 0 and value_antiquant_mode 1,", query, {at::kHalf});
  });
}

// int8 query, key and value with bfloat16 rope parts: documentation of
// npu_fused_infer_attention_score_v2, where query_rope is given.
void FusedInfer::check_quantized() const {
  rule("fused_infer_int8.query-scales", [&] {
    require(query_scale->numel() == query.numel() / width, "dequant_scale_query has shape ",
        query_scale->sizes(), "; one for each token and head is expected");
    require(key_quant.scale.defined() && value_quant.scale.defined() &&
                key_quant.scale.numel() == 1 && value_quant.scale.numel() == 1,
        "dequant_scale_key and dequant_scale_value must be given, of one element each");
  });
}

// Int8 keys of more than one query token, and an int8 output.
void FusedInfer::check_int8() const {
  if (key[0].scalar_type() == at::kChar && !query_scale && longest > 1 && !packed(in))
    rule("fused_infer_int8.prefill", [&] {
      if (!key_scale) return one_of("query, with antiquant_scale,", query, {at::kHalf});
      one_of("query, with int8 keys and more than one token,", query, {at::kBFloat16});
      within("the number of query tokens, with int8 keys,", longest, 1, 16);
      one_of<int64_t>("key_antiquant_mode, with more than one query token,", key_quant.mode, {1});
      require(!paged() && key.size() == 1 && !query_padding && !kv_padding && !key_prefix,
          "int8 keys and more than one query token go with no block_table, list of keys, left "
          "padding or shared prefix");
    });
  rule("fused_infer_int8.output-scale", [&] {
    const int64_t factors = out_scale ? out_scale->numel() : 1;
    require(factors == 1 || factors == heads * value_width(), "quant_scale2 has ", factors,
        " elements; allowed: 1 and ", heads * value_width());
    require(factors == 1 || !(query_padding || kv_padding || lse.defined()),
        "quant_scale2 by channels goes with no left padding and no softmax_lse");
  });
  if (!out_offset) return;
  rule("fused_infer_int8.masked-rows", [&] {
    for (const auto& span : spans) {
      const int64_t more = span.kv_count - span.count;
      const bool whole = sparse_mode == 0   ? !mask || (-more <= before && after >= 0)
                         : sparse_mode == 3 ? more >= 0
                                            : sparse_mode != 4 || (before >= 0 && after >= -more);
      require(whole, "a query token sees no key, with ", span.count, " query tokens, ",
          span.kv_count, " keys and sparse_mode ", sparse_mode, "; quant_offset2 needs keys");
    }
  });
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
  rule("fused_infer_int8.scale-shapes", [&] {
    check_both("the antiquant scale of key", "the antiquant offset of key", key_quant, width);
    check_both("the antiquant scale of value", "the antiquant offset of value", value_quant,
        value_width());
  });
}

void FusedInfer::check_heads() const {
  const int64_t most = latent() ? 128 : 64;
  rule("fused_infer.groups", heads % groups == 0 && heads / groups <= most, heads, " heads over ",
      groups, " key-value heads; a multiple of at most ", most, " is allowed");
  rule("fused_infer.head-size", [&] {
    within("the head size", width, 1, 512);
    multiple("the head size", width, key[0].scalar_type() == at::kChar ? 32 : 16);
  });
  if (!latent() && packed(in)) rule("fused_infer.packed-head-sizes", [&] { check_packed_heads(); });
  rule("fused_infer.columns",
      longest == 1 || latent() || (in != "BSH" && in != "BSND") || heads * width < 65535,
      "heads x head size is ", heads * width, " in layout ", layout, "; it must be below 65535");
  if (in != "BSH" && in != "NSD")
    rule("fused_infer.query-heads", [&] {
      const int64_t found = query.size(in == "BSND" ? 2 : in == "NTD" ? 0 : 1);
      require(found == heads, "query has ", found, " heads in layout ", layout,
          " and num_heads is ", heads);
    });
  rule("fused_infer.layout-tokens", [&] {
    require(layout != "BNSD_BSND" || longest > 1,
        "layout BNSD_BSND is for queries of more than one token");
    require(layout != "BNSD_NBSD" || longest <= 16, "query has ", longest,
        " tokens in layout BNSD_NBSD; at most 16 are allowed");
  });
  // Bit 0, high performance, affects float16 only, and what it rounds is not documented: computed
  // with high precision. Bit 1, correction of fully masked rows, is always on.
  rule("fused_infer.inner-precise-of-decode",
      [&] { within("inner_precise", inner_precise, 0, longest == 1 && !packed(in) ? 1 : 3); });
}

// op-plugin's page of npu_fused_infer_attention_score_v2 has 64, 128, and 192 with values of 128
// for multi-head attention; the text and the values of 192 are those of hardware (vllm-ascend,
// issue 4020 and pull request 9632). Grouped queries of other sizes: docs/emulator-behaviour.md,
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
  if (packed(in)) {
    rule("fused_infer.packed-requests", batch <= 4096, "actual_seq_lengths has ", batch,
        " entries in layout ", layout, "; at most 4096 are allowed");
    rule("fused_infer.packed-tokens", [&] { within("the number of tokens", longest, 0, 1 << 20); });
    rule("fused_infer.packed-only",
        !query_padding && !kv_padding && !out_scale && key[0].scalar_type() != at::kChar, "layout ",
        layout, " goes with no left padding, int8 keys or quantized output");
  }
  int64_t queries = 0, keys = 0;
  for (const auto& span : spans)
    queries = std::max(queries, span.count), keys = std::max(keys, span.kv_count);
  workspace_for_keys(keys);
  if (queries > 1)
    return rule("fused_infer.long-sequences", [&] {
      within("the number of keys", keys, 0, 20971520);
      within("the number of query tokens", longest, 0, 20971520);
    });
  rule("fused_infer.keys-of-decode", keys <= 262144, "a request has ", keys,
      " keys; at most 262144 are allowed with one query token");
}

void FusedInfer::check_mask() const {
  const bool ignored =
      longest == 1 && !latent() &&
      !packed(in);  // "sparse_mode has no effect when Q_S is 1 and there is no rope"
  rule("fused_infer.compressed-mask", [&] {
    if (sparse_mode < 2 || ignored) return;
    require(mask.has_value(), "sparse_mode ", sparse_mode, " needs atten_mask");
    require(mask->size(-1) == kMaskSide && mask->size(-2) == kMaskSide &&
                mask->numel() == kMaskSide * kMaskSide,
        "sparse_mode ", sparse_mode, " needs an atten_mask of 2048 x 2048, not ", mask->sizes());
  });
  int64_t keys = 0;  // of the longest request
  for (const auto& span : spans) keys = std::max(keys, span.kv_count);
  if (key_prefix) keys += entry(prefix_lengths, 0, length_of(*key_prefix, in));
  if (paged()) keys = std::max(keys, table.size(1) * block_size);
  rule("fused_infer.whole-mask", [&] {
    require(sparse_mode != 1 || mask, "sparse_mode 1 needs atten_mask");
    if (mask && sparse_mode < 2)
      for (const int64_t i : {int64_t{0}, batch - 1})
        mask_of_request(*mask, longest == 1, i, longest, keys);
  });
  rule("fused_infer.packed-mask", [&] {
    if (!packed(in)) return;
    require(mask ? sparse_mode > 2 : sparse_mode == 0, "sparse_mode is ", sparse_mode,
        mask ? " with" : " without", " atten_mask in layout ", layout,
        "; allowed: 3 and 4 with it, and 0 without");
    for (const auto& span : spans)
      require(sparse_mode != 4 || (before >= -span.count && after >= -span.kv_count &&
                                      before + std::min(after, INT64_MAX - before) >= 0),
          "pre_tokens is ", before, " and next_tokens ", after, " for ", span.count,
          " query tokens and ", span.kv_count, " keys; no key is within them");
  });
  rule("fused_infer.pse-shape", [&] {
    if (!pse) return;
    require(!packed(in), "pse_shift is not supported in layout ", layout);
    require(pse->dim() == 4 && (pse->size(0) == 1 || pse->size(0) == batch) &&
                pse->size(1) == heads && pse->size(2) >= longest && pse->size(3) >= keys,
        "pse_shift has shape ", pse->sizes(), "; it must be [1 or ", batch, ", ", heads, ", ",
        longest, ", ", keys, "], or larger in the last two");
  });
  rule("fused_infer.sink", [&] {
    if (!sink) return;
    require(packed(in), "learnable_sink is supported in layouts TND and NTD_TND, not in ", layout);
    shape("learnable_sink", *sink, {heads});
    require(value_width() <= 128, "the value's head size is ", value_width(),
        "; learnable_sink allows at most 128");
  });
}

void FusedInfer::check_latent() const {
  if (!latent()) return;
  rule("fused_infer_latent.shapes", [&] {
    require(width == 512 || width == 128, "the head size is ", width,
        " with query_rope; 512 and 128 are allowed");
    require(query_rope->numel() == query.numel() / width * 64, "query_rope has shape ",
        query_rope->sizes(), "; it must be that of query with a last dimension of 64 per head");
  });
  rule("fused_infer_latent.only",
      !pse && !key_prefix && !out_scale && !query_padding && !kv_padding &&
          (query_scale || key[0].scalar_type() != at::kChar),
      "query_rope goes with no pse_shift, prefix, quant_scale2, left padding or int8 keys");
  if (width == 128)
    return rule("fused_infer_latent.prefill", packed(in) && !paged(),
        "head size 128 with query_rope is supported in layouts TND and NTD_TND without a "
        "block_table");
  rule("fused_infer_latent.heads", [&] {
    require(groups == 1, "num_key_value_heads is ", groups,
        " with query_rope and head size 512; it must be 1");
    require((heads & (heads - 1)) == 0 && heads <= 128, "num_heads is ", heads,
        " with query_rope; 1, 2, 4, 8, 16, 32, 64 and 128 are allowed");
  });
  if (sparse_mode == 4)
    return rule("fused_infer_latent.band", [&] {
      require(in == "BSND" && heads == 128 && key[0].dim() != 5, "layout is ", layout,
          " and num_heads ", heads,
          " with query_rope and sparse_mode 4; BSND and 128 are allowed, and ND caches");
      if (paged()) one_of<int64_t>("block_size, with sparse_mode 4,", block_size, {64, 128});
      for (const auto& span : spans)
        require(span.count <= span.kv_count && span.kv_count <= 131088, "a request has ",
            span.count, " query tokens and ", span.kv_count,
            " keys with query_rope and sparse_mode 4; as many keys as query tokens, and at most "
            "131088, are allowed");
    });
  rule("fused_infer_latent.pages", [&] {
    if (!paged()) return;
    within("block_size", block_size, 16, 1024);
    multiple("block_size", block_size, 16);
    require(key[0].dim() != 5 || (block_size == 128 && in != "BNSD"),
        "a fractal (NZ) cache needs block_size 128 and a layout other than BNSD");
  });
  rule("fused_infer_latent.tokens", [&] {
    int64_t most = longest;
    if (packed(in)) {
      most = 0;
      for (const auto& span : spans) most = std::max(most, span.count);
    }
    require(most <= 16, "a request has ", most,
        " query tokens with query_rope; at most 16 are allowed");
    require(most > 1 ? sparse_mode == 3 : packed(in) || (sparse_mode == 0 && !mask),
        "sparse_mode is ", sparse_mode, " with query_rope and ", most,
        " query tokens; it must be 3, or for one token 0 and without atten_mask");
  });
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
  require(kv_lengths && !kv_lengths->empty(), "a paged cache needs actual_seq_lengths_kv");
  require(
      table.size(0) == batch, "block_table has ", table.size(0), " rows for ", batch, " requests");
  require(!query_padding && !kv_padding && !key_prefix,
      "a paged cache goes with no left padding and no shared prefix");
  const bool small = key[0].scalar_type() == at::kChar;
  multiple("block_size", block_size, small ? 32 : 16);
  if (longest > 1 && !latent() && !packed(in))
    multiple("block_size, for queries of more than one token,", block_size, 128);
  const auto& cache = key[0];
  require(cache.dim() == 3 || cache.dim() == 5 ||
              (cache.dim() == 4 && in != "BSH" && in != "BSND") || (cache.dim() == 4 && latent()),
      "key has shape ", cache.sizes(),
      "; a paged cache is [blocks, block_size, H], for BNSD and TND also [blocks, KV_N, "
      "block_size, D], or [blocks, KV_N, D / "
      "c, block_size, c]");
  require_emulated(cache.dim() != 5 || latent() || !small,
      "key is int8 in fractal order without query_rope, which is not emulated");
  const int64_t found = cache.size(cache.dim() == 3 ? 1 : cache.dim() - 2);
  require(
      found == block_size, "key has blocks of ", found, " tokens and block_size is ", block_size);
  require(cache.dim() != 3 || cache.size(2) <= 65535, "H of the cache is ", cache.size(-1),
      "; at most 65535 is allowed");
  require(cache.dim() != 5 || cache.size(4) == (small ? 32 : 16), "key has fractals of ",
      cache.size(-1), "; it must be ", small ? 32 : 16);
}

// Atlas A2 computes NaN and infinities from finite caches. It is seen in the later chunks of a
// prompt, in calls that have prompts' other requests too; decodes with a token for each request
// are served. The kernel of prompts computes all requests of a call.
void FusedInfer::check_chunks() const {
  if (!packed(in) || latent() || width <= 192 || !is_chip("Ascend910B")) return;
  const bool several = std::any_of(
                 spans.begin(), spans.end(), [](const Span& span) { return span.count > 1; }),
             other = std::any_of(spans.begin(), spans.end(),
                 [](const Span& span) { return span.kv_count && span.kv_count != span.count; });
  rule("fused_infer_large_heads.pages", !several || !other, "the head size is ", width,
      " with a block_table in layout ", layout,
      ", for requests of more than one query token and keys before them; ", chip().name,
      " allows 192: gather keys and values, and call without a block_table");
}

void FusedInfer::check_prefix() const {
  require(value_prefix && key_prefix->size(0) == 1 && !packed(in) && key.size() == 1 &&
              !query_padding && !kv_padding,
      "a shared prefix has a batch of 1, a key and a value, and no packed layout, list of keys or "
      "left padding");
  const int64_t length = length_of(*key_prefix, in);
  require(length_of(*value_prefix, in) == length, "key_shared_prefix has ", length,
      " tokens and value_shared_prefix ", length_of(*value_prefix, in));
  within("actual_shared_prefix_len", entry(prefix_lengths, 0, length), int64_t{0}, length);
}

}  // namespace emu::attention
