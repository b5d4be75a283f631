// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Entry points of training attention (flash_attention.h).
#include "flash_attention.h"

namespace {

using namespace emu;
using namespace emu::attention;

struct Inputs : FlashInputs {
  FIELDS(query, key, value, pse, drop_mask, padding_mask, mask)
};
struct RopedInputs : FlashInputs {
  FIELDS(query, query_rope, key, key_rope, value, pse, drop_mask, padding_mask, mask)
};
// Of version 4, which has all layouts and draws the dropout itself.
struct ScaledInputs : FlashInputs {
  Opt<Tensor> query_scale, key_scale, value_scale, sink;
  FIELDS(query, key, value, pse, drop_mask, padding_mask, mask, query_rope, key_rope, query_scale,
      key_scale, value_scale, sink)
};
struct Results {
  Opt<Tensor> most, sum, softmax;
  Tensor out;
  FIELDS(most, sum, softmax, out)
};
struct BackwardInputs : FlashInputs {
  Tensor grad;
  Opt<Tensor> most, sum, softmax, out;
};
struct GradInputs : BackwardInputs {
  FIELDS(query, key, value, grad, pse, drop_mask, padding_mask, mask, most, sum, softmax, out)
};
struct RopedGradInputs : BackwardInputs {
  FIELDS(query, query_rope, key, key_rope, value, grad, pse, drop_mask, padding_mask, mask, most,
      sum, softmax, out)
};
struct Gradients : Flash::Gradients {
  FIELDS(query_grad, key_grad, value_grad, pse_grad)
};
struct RopedGradients : Flash::Gradients {
  FIELDS(query_grad, query_rope_grad, key_grad, key_rope_grad, value_grad, pse_grad)
};

Computation forward(const FlashInputs& in, const FlashSettings& settings, const Results& to,
    const FlashOptions& options) {
  Flash flash{in, settings, options, to.most.value_or(Tensor()), to.sum.value_or(Tensor())};
  flash.checked();
  int64_t keys = 0;
  for (const auto& span : flash.spans) keys = std::max(keys, span.kv_count);
  workspace_for_keys(keys);
  return [flash = std::move(flash), out = to.out] { flash.forward(out); };
}

Computation backward(const BackwardInputs& in, const FlashSettings& settings, Flash::Gradients to,
    const FlashOptions& options, const Opt<Tensor>& sink_grad = {}) {
  Flash flash{in, settings, options, in.most.value_or(Tensor()), in.sum.value_or(Tensor())};
  flash.checked();
  require(in.most && in.sum && in.out,
      "softmax_max, softmax_sum and attention_in of the forward pass are needed");
  same_dtype("dy", in.grad, "query", flash.query);
  to.sink_grad = sink_grad;
  return [flash = std::move(flash), grad = in.grad, out = *in.out, to] {
    flash.backward(grad, out, to);
  };
}

}  // namespace

CHECKED(aclnnFlashAttentionScore, (Inputs in, Opt<Ints> prefix, FlashSettings settings, Results to),
    { return forward(in, settings, to, {prefix}); })
CHECKED(aclnnFlashAttentionScoreV2,
    (Inputs in, Opt<Ints> prefix, Starts starts, FlashSettings settings, int64_t pse_type,
        Results to),
    { return forward(in, settings, to, {prefix, {}, starts, pse_type}); })
CHECKED(aclnnFlashAttentionScoreV3,
    (Inputs in, Opt<Tensor> sink, Opt<Ints> prefix, Starts starts, FlashSettings settings,
        int64_t pse_type, Results to),
    { return forward(in, settings, to, {prefix, {}, starts, pse_type, "", sink}); })
MAX_WORKSPACE(aclnnFlashAttentionScoreV3)
// torch_npu calls it on Ascend950, and the others elsewhere.
CHECKED(aclnnFlashAttentionScoreV4,
    (ScaledInputs in, Opt<Ints> prefix, Ends ends, Starts starts, double scale, double keep,
        int64_t before, int64_t after, int64_t heads, Text layout, int64_t inner_precise,
        int64_t sparse_mode, int64_t out_dtype, int64_t pse_type, Text stats_layout, int64_t seed,
        int64_t offset, Results to),
    {
      require_emulated(keep == 1, "dropout by the seed ", seed, " and the offset ", offset,
          " is not emulated; keep_prob is ", keep);
      require_emulated(out_dtype == 0, "out_dtype ", out_dtype, " is not emulated; 0 is");
      refuse_given(
          "d_scale_q, d_scale_k or d_scale_v", in.query_scale, in.key_scale, in.value_scale);
      return forward(in, {scale, keep, before, after, heads, layout, inner_precise, sparse_mode},
          to, {prefix, ends, starts, pse_type, stats_layout, in.sink});
    })
MAX_WORKSPACE(aclnnFlashAttentionScoreV4)
CHECKED(aclnnFlashAttentionVarLenScore,
    (Inputs in, Opt<Ints> prefix, Ends ends, FlashSettings settings, Results to),
    { return forward(in, settings, to, {prefix, ends}); })
CHECKED(aclnnFlashAttentionVarLenScoreV2,
    (Inputs in, Opt<Ints> prefix, Ends ends, Starts starts, FlashSettings settings,
        int64_t pse_type, Results to),
    { return forward(in, settings, to, {prefix, ends, starts, pse_type}); })
CHECKED(aclnnFlashAttentionVarLenScoreV3,
    (RopedInputs in, Opt<Ints> prefix, Ends ends, Starts starts, FlashSettings settings,
        int64_t pse_type, Results to),
    { return forward(in, settings, to, {prefix, ends, starts, pse_type}); })
CHECKED(aclnnFlashAttentionVarLenScoreV4,
    (Inputs in, Opt<Ints> prefix, Ends ends, FlashSettings settings, Text stats_layout, Results to),
    { return forward(in, settings, to, {prefix, ends, {}, 1, stats_layout}); })
CHECKED(aclnnFlashAttentionVarLenScoreV5,
    (RopedInputs in, Opt<Tensor> sink, Opt<Ints> prefix, Ends ends, Starts starts,
        FlashSettings settings, int64_t pse_type, Text stats_layout, Results to),
    { return forward(in, settings, to, {prefix, ends, starts, pse_type, stats_layout, sink}); })
MAX_WORKSPACE(aclnnFlashAttentionVarLenScoreV5)

CHECKED(aclnnFlashAttentionScoreGrad,
    (GradInputs in, Opt<Ints> prefix, FlashSettings settings, Gradients to),
    { return backward(in, settings, to, {prefix}); })
CHECKED(aclnnFlashAttentionScoreGradV2,
    (GradInputs in, Opt<Ints> prefix, Starts starts, FlashSettings settings, int64_t pse_type,
        Gradients to),
    { return backward(in, settings, to, {prefix, {}, starts, pse_type}); })
CHECKED(aclnnFlashAttentionScoreGradV3,
    (GradInputs in, Opt<Tensor> sink, Opt<Ints> prefix, Starts starts, FlashSettings settings,
        int64_t pse_type, Gradients to, Opt<Tensor> sink_grad),
    { return backward(in, settings, to, {prefix, {}, starts, pse_type, "", sink}, sink_grad); })
CHECKED(aclnnFlashAttentionUnpaddingScoreGrad,
    (GradInputs in, Opt<Ints> prefix, Ends ends, FlashSettings settings, Gradients to),
    { return backward(in, settings, to, {prefix, ends}); })
CHECKED(aclnnFlashAttentionUnpaddingScoreGradV2,
    (GradInputs in, Opt<Ints> prefix, Ends ends, Starts starts, FlashSettings settings,
        int64_t pse_type, Gradients to),
    { return backward(in, settings, to, {prefix, ends, starts, pse_type}); })
CHECKED(aclnnFlashAttentionUnpaddingScoreGradV3,
    (RopedGradInputs in, Opt<Ints> prefix, Ends ends, Starts starts, FlashSettings settings,
        int64_t pse_type, RopedGradients to),
    { return backward(in, settings, to, {prefix, ends, starts, pse_type}); })
CHECKED(aclnnFlashAttentionUnpaddingScoreGradV4,
    (GradInputs in, Opt<Ints> prefix, Ends ends, FlashSettings settings, Gradients to,
        Text stats_layout),
    { return backward(in, settings, to, {prefix, ends, {}, 1, stats_layout}); })
CHECKED(aclnnFlashAttentionUnpaddingScoreGradV5,
    (RopedGradInputs in, Opt<Tensor> sink, Opt<Ints> prefix, Ends ends, Starts starts,
        FlashSettings settings, int64_t pse_type, Text stats_layout, RopedGradients to,
        Opt<Tensor> sink_grad),
    {
      return backward(
          in, settings, to, {prefix, ends, starts, pse_type, stats_layout, sink}, sink_grad);
    })
