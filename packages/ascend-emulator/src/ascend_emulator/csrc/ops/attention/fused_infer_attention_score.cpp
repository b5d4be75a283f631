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

struct InferResults {
  Tensor out;
  Opt<Tensor> lse;
  FIELDS(out, lse)
};
struct IncreInputs : InferInputs {
  FIELDS(query, key, value, pse, mask, kv_lengths, dequant1, quant1, dequant2, out_scale,
      out_offset, both_scale, both_offset, block_table, kv_padding)
};
struct IncreSettings : InferSettings {
  FIELDS(heads, scale, layout, groups, block_size, inner_precise)
};

Computation computation(const InferInputs& in, const InferRope& rope, const InferSettings& settings,
    const InferResults& to, const Opt<Tensor>& sink = {}, const Opt<Tensor>& query_scale = {}) {
  refuse_given("key_rope_antiquant_scale", rope.rope_scale);
  refuse_given("an int8 query (dequant_scale1, quant_scale1, dequant_scale2)", in.dequant1,
      in.quant1, in.dequant2);
  FusedInfer fused{in, rope, settings, sink, query_scale,
      antiquant(in.key_scale, in.key_offset, settings.key_mode, in.both_scale, in.both_offset,
          settings.both_mode, 0),
      antiquant(in.value_scale, in.value_offset, settings.value_mode, in.both_scale, in.both_offset,
          settings.both_mode, 1),
      to.out, settings.want_lse ? to.lse.value_or(Tensor()) : Tensor()};
  fused.checked();
  return [fused = std::move(fused)]() mutable { fused.run(); };
}

}  // namespace

// Before CANN 8.1.RC1.
CHECKED(aclnnFusedInferAttentionScoreV2, (InferInputs in, InferSettings settings, InferResults to),
    { return computation(in, {}, settings, to); })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV2)

CHECKED(aclnnFusedInferAttentionScoreV3,
    (InferInputs in, InferRope rope, InferSettings settings, InferResults to),
    { return computation(in, rope, settings, to); })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV3)

CHECKED(aclnnFusedInferAttentionScoreV4,
    (InferInputs in, InferRope rope, Opt<Tensor> query_scale, Opt<Tensor> sink,
        InferSettings settings, int64_t query_mode, InferResults to),
    { return computation(in, rope, settings, to, sink, query_scale); })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV4)

// torch_npu calls it on Ascend950, and the others elsewhere.
CHECKED(aclnnFusedInferAttentionScoreV5,
    (InferInputs in, InferRope rope, Opt<Tensor> query_scale, Opt<Tensor> sink,
        Opt<Tensor> query_first, Opt<Tensor> kv_first, InferSettings settings, int64_t query_mode,
        int64_t pse_type, InferResults to),
    {
      refuse_given("q_start_idx or kv_start_idx", query_first, kv_first);
      require_emulated(pse_type == 0, "pse_type ", pse_type, " is not emulated; 0 is");
      return computation(in, rope, settings, to, sink, query_scale);
    })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV5)

CHECKED(aclnnPromptFlashAttentionV3,
    (Tensor query, Tensor key, Tensor value, Opt<Tensor> pse, Opt<Tensor> mask,
        Opt<Ints> query_lengths, Opt<Ints> kv_lengths, Opt<Tensor> dequant1, Opt<Tensor> quant1,
        Opt<Tensor> dequant2, Opt<Tensor> out_scale, Opt<Tensor> out_offset, int64_t heads,
        double scale, int64_t before, int64_t after, Text layout, int64_t groups,
        int64_t sparse_mode, int64_t inner_precise, Tensor out),
    {
      refuse_given(
          "an int8 query (deq_scale1, quant_scale1, deq_scale2)", dequant1, quant1, dequant2);
      return computation({query, {key}, {value}, pse, mask, query_lengths, kv_lengths, {}, {}, {},
                             out_scale, out_offset},
          {}, {heads, scale, before, after, layout, groups, sparse_mode, inner_precise}, {out, {}});
    })

CHECKED(aclnnIncreFlashAttentionV4, (IncreInputs in, IncreSettings settings, Tensor out), {
  one_of<Text>("input_layout", settings.layout, {"BSH", "BSND", "BNSD"});
  const int64_t tokens = in.query.size(settings.layout == "BNSD" ? 2 : 1);
  require(tokens == 1, "query has ", tokens, " tokens; it must be 1");
  return computation(in, {}, settings, {out, {}});
})
