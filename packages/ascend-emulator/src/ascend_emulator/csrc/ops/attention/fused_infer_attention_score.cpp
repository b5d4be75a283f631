// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Inference attention over contiguous and paged KV caches. Rules: torch_npu's documentation of
// npu_fused_infer_attention_score, _v2, npu_prompt_flash_attention and npu_incre_flash_attention
// (torch_npu/_op_plugin_docs.py); argument order: op-plugin's call sites.
#include "fused_infer_attention.h"

namespace {

using namespace emu;
using namespace emu::attention;

// antiquant_scale and antiquant_offset are [2, ...]: of the key and the value.
Antiquant antiquant(const Opt<Tensor>& own_scale, const Opt<Tensor>& own_offset, int64_t own_mode,
    const Opt<Tensor>& scale, const Opt<Tensor>& offset, int64_t mode, int64_t part) {
  if (own_scale) return {*own_scale, own_offset.value_or(Tensor()), own_mode};
  if (!scale) return {};
  return {scale->select(0, part), offset ? offset->select(0, part) : Tensor(), mode};
}

Computation computation(FusedInfer fused) {
  fused.checked();
  return [fused = std::move(fused)]() mutable { fused.run(); };
}

Tensor wanted(bool want, const Opt<Tensor>& lse) {
  return want ? lse.value_or(Tensor()) : Tensor();
}

}  // namespace

// torch_npu calls this before a capture, for the maximum workspace of later updates.
#define MAX_WORKSPACE(NAME)                                                        \
  extern "C" {                                                                     \
  static void* resolve_max_##NAME() {                                              \
    return reinterpret_cast<void*>(                                                \
        &emu::Operator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace); \
  }                                                                                \
  __attribute__((visibility("default"), ifunc("resolve_max_" #NAME))) void         \
  NAME##GetMaxWorkspaceSize();                                                     \
  }

#define COMMON                                                                                     \
  Tensor query, Tensors key, Tensors value, Opt<Tensor> pse, Opt<Tensor> mask,                     \
      Opt<Ints> query_lengths, Opt<Ints> kv_lengths, Opt<Tensor> dequant1, Opt<Tensor> quant1,     \
      Opt<Tensor> dequant2, Opt<Tensor> out_scale, Opt<Tensor> out_offset, Opt<Tensor> both_scale, \
      Opt<Tensor> both_offset, Opt<Tensor> table, Opt<Tensor> query_padding,                       \
      Opt<Tensor> kv_padding, Opt<Tensor> key_scale, Opt<Tensor> key_offset,                       \
      Opt<Tensor> value_scale, Opt<Tensor> value_offset, Opt<Tensor> key_prefix,                   \
      Opt<Tensor> value_prefix, Opt<Ints> prefix_lengths
#define SHAPES                                                                                    \
  int64_t heads, double scale, int64_t before, int64_t after, Text layout, int64_t groups,        \
      int64_t sparse_mode, int64_t precise, int64_t block_size, int64_t both_mode, bool want_lse, \
      int64_t key_mode, int64_t value_mode
#define FUSED_INFER(QUERY_ROPE, KEY_ROPE, SINK, QUERY_SCALE)                                       \
  refuse_given(                                                                                    \
      "an int8 query (dequant_scale1, quant_scale1, dequant_scale2)", dequant1, quant1, dequant2); \
  return computation({.query = query,                                                              \
      .key = key,                                                                                  \
      .value = value,                                                                              \
      .pse = pse,                                                                                  \
      .mask = mask,                                                                                \
      .query_lengths = query_lengths,                                                              \
      .kv_lengths = kv_lengths,                                                                    \
      .block_table = table,                                                                        \
      .query_padding = query_padding,                                                              \
      .kv_padding = kv_padding,                                                                    \
      .key_prefix = key_prefix,                                                                    \
      .value_prefix = value_prefix,                                                                \
      .prefix_lengths = prefix_lengths,                                                            \
      .query_rope = QUERY_ROPE,                                                                    \
      .key_rope = KEY_ROPE,                                                                        \
      .sink = SINK,                                                                                \
      .query_scale = QUERY_SCALE,                                                                  \
      .key_quant =                                                                                 \
          antiquant(key_scale, key_offset, key_mode, both_scale, both_offset, both_mode, 0),       \
      .value_quant =                                                                               \
          antiquant(value_scale, value_offset, value_mode, both_scale, both_offset, both_mode, 1), \
      .out_scale = out_scale,                                                                      \
      .out_offset = out_offset,                                                                    \
      .heads = heads,                                                                              \
      .groups = groups,                                                                            \
      .block_size = block_size,                                                                    \
      .scale = scale,                                                                              \
      .before = before,                                                                            \
      .after = after,                                                                              \
      .layout = layout,                                                                            \
      .sparse_mode = sparse_mode,                                                                  \
      .inner_precise = precise,                                                                    \
      .out = out,                                                                                  \
      .lse = wanted(want_lse, lse)})

// Before CANN 8.1.RC1.
CHECKED(aclnnFusedInferAttentionScoreV2, (COMMON, SHAPES, Tensor out, Opt<Tensor> lse),
    { FUSED_INFER({}, {}, {}, {}); })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV2)

CHECKED(aclnnFusedInferAttentionScoreV3,
    (COMMON, Opt<Tensor> query_rope, Opt<Tensor> key_rope, Opt<Tensor> rope_scale, SHAPES,
        Tensor out, Opt<Tensor> lse),
    {
      refuse_given("key_rope_antiquant_scale", rope_scale);
      FUSED_INFER(query_rope, key_rope, {}, {});
    })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV3)

CHECKED(aclnnFusedInferAttentionScoreV4,
    (COMMON, Opt<Tensor> query_rope, Opt<Tensor> key_rope, Opt<Tensor> rope_scale,
        Opt<Tensor> query_scale, Opt<Tensor> sink, SHAPES, int64_t, Tensor out, Opt<Tensor> lse),
    {
      refuse_given("key_rope_antiquant_scale", rope_scale);
      FUSED_INFER(query_rope, key_rope, sink, query_scale);
    })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV4)

CHECKED(aclnnPromptFlashAttentionV3,
    (Tensor query, Tensor key, Tensor value, Opt<Tensor> pse, Opt<Tensor> mask,
        Opt<Ints> query_lengths, Opt<Ints> kv_lengths, Opt<Tensor> dequant1, Opt<Tensor> quant1,
        Opt<Tensor> dequant2, Opt<Tensor> out_scale, Opt<Tensor> out_offset, int64_t heads,
        double scale, int64_t before, int64_t after, Text layout, int64_t groups,
        int64_t sparse_mode, int64_t precise, Tensor out),
    {
      refuse_given(
          "an int8 query (deq_scale1, quant_scale1, deq_scale2)", dequant1, quant1, dequant2);
      one_of<Text>("input_layout", layout, {"BSH", "BSND", "BNSD", "BNSD_BSND", "NSD"});
      return computation({.query = query,
          .key = {key},
          .value = {value},
          .pse = pse,
          .mask = mask,
          .query_lengths = query_lengths,
          .kv_lengths = kv_lengths,
          .out_scale = out_scale,
          .out_offset = out_offset,
          .heads = heads,
          .groups = groups,
          .scale = scale,
          .before = before,
          .after = after,
          .layout = layout,
          .sparse_mode = sparse_mode,
          .inner_precise = precise,
          .out = out});
    })

CHECKED(aclnnIncreFlashAttentionV4,
    (Tensor query, Tensors key, Tensors value, Opt<Tensor> pse, Opt<Tensor> mask,
        Opt<Ints> kv_lengths, Opt<Tensor> dequant1, Opt<Tensor> quant1, Opt<Tensor> dequant2,
        Opt<Tensor> out_scale, Opt<Tensor> out_offset, Opt<Tensor> both_scale,
        Opt<Tensor> both_offset, Opt<Tensor> table, Opt<Tensor> kv_padding, int64_t heads,
        double scale, Text layout, int64_t groups, int64_t block_size, int64_t precise, Tensor out),
    {
      refuse_given("an int8 query (dequant_scale1, quant_scale1, dequant_scale2)", dequant1, quant1,
          dequant2);
      one_of<Text>("input_layout", layout, {"BSH", "BSND", "BNSD"});
      const int64_t places = layout == "BNSD" ? 2 : 1;
      require(query.size(places) == 1, "query has ", query.size(places), " tokens; it must be 1");
      return computation({.query = query,
          .key = key,
          .value = value,
          .pse = pse,
          .mask = mask,
          .kv_lengths = kv_lengths,
          .block_table = table,
          .kv_padding = kv_padding,
          .key_quant = antiquant({}, {}, 0, both_scale, both_offset, 0, 0),
          .value_quant = antiquant({}, {}, 0, both_scale, both_offset, 0, 1),
          .out_scale = out_scale,
          .out_offset = out_offset,
          .heads = heads,
          .groups = groups,
          .block_size = block_size,
          .scale = scale,
          .before = INT64_MAX,
          .after = INT64_MAX,
          .layout = layout,
          .inner_precise = precise,
          .out = out});
    })
