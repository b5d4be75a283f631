// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Projections, RMSNorm, rotary embedding and cache write before multi-head latent attention. Rules:
// torch_npu's documentation of npu_mla_prolog_v2 and _v3 (torch_npu/_op_plugin_docs.py) and the
// golden functions of op-plugin's test_mla_prolog*.py; argument order: op-plugin's call sites.
#include "kv_rms_norm_rope_cache.h"

namespace {

using namespace emu;

struct Prolog {
  Tensor x, down_query, up_query, up_key, down_key, query_gamma, key_gamma, sin, cos, index,
      kv_cache, rope_cache;
  Opt<Tensor> x_scale, down_query_scale, up_query_scale, down_key_scale, kv_scale, rope_scale,
      smooth;
  double query_epsilon, key_epsilon;
  Text mode_name;
  double query_correction, key_correction;
  Tensor query, query_rope;
  Opt<Tensor> query_scale, query_norm, query_norm_scale;

  int64_t rotary = 0;
  CacheMode mode = {};

  Prolog& checked() {
    rotary = cos.size(-1);
    rule("mla_prolog.up-columns", [&] {
      const int64_t columns = up_key.size(0) * (up_key.size(1) + rotary);
      shape("weight_uq_qr", up_query, {down_query.size(1), columns});
    });
    mode = mode_of(mode_name, {"PA_BSND", "PA_NZ"});
    return *this;
  }

  // x @ weight in float32; int8 matmuls are exact.
  static Tensor product(const Tensor& x, const Tensor& weight, const Opt<Tensor>& row_scale,
      const Opt<Tensor>& column_scale) {
    if (weight.scalar_type() != at::kChar)
      return at::matmul(x.to(at::kFloat), weight.to(at::kFloat));
    return at::matmul(x.to(at::kDouble), weight.to(at::kDouble))
        .mul_(row_scale->view({-1, 1}))
        .mul_(column_scale->view({1, -1}))
        .to(at::kFloat);
  }

  void run() {
    const int64_t count = index.numel(), heads = up_key.size(0), size = up_key.size(1),
                  latent = up_key.size(2);
    if (count == 0) return;
    const auto flat = x.view({count, x.size(-1)}), c = cos.reshape({count, 1, rotary}),
               s = sin.reshape({count, 1, rotary});
    auto normed = rms_normed(
        product(flat, down_query, x_scale, down_query_scale), query_gamma, query_epsilon);
    Opt<Tensor> normed_scale;
    if (up_query.scalar_type() == at::kChar) {
      if (smooth) normed = normed * smooth->view({1, -1});
      normed_scale = normed.abs().amax(-1, true) / 127;
      normed =
          (normed / normed_scale->masked_fill(*normed_scale == 0, 1)).round().clamp_(-128, 127);
    } else {
      normed = normed.to(at::kBFloat16);
    }
    if (query_norm && query_norm->numel() == normed.numel()) copy_reshaped(query_norm, normed);
    if (query_norm_scale && normed_scale && query_norm_scale->numel() == count)
      copy_reshaped(query_norm_scale, *normed_scale);
    const auto both = (product(normed, up_query, normed_scale, up_query_scale) * query_correction)
                          .view({count, heads, size + rotary});
    const auto part = both.narrow(-1, 0, size).to(at::kBFloat16).to(at::kFloat).transpose(0, 1);
    auto absorbed = at::bmm(part, up_key.to(at::kFloat)).transpose(0, 1);
    auto rope = rotate(halves_of_pairs(both.narrow(-1, size, rotary)), c, s, false);
    if (query.scalar_type() == at::kChar) {  // per token and head; the rope part is scaled equally,
                                             // so that one factor dequantizes the scores
      absorbed = absorbed.to(at::kBFloat16).to(at::kFloat);
      const auto scale = absorbed.abs().amax(-1, true) / 127,
                 divisor = scale.masked_fill(scale == 0, 1);
      absorbed = (absorbed / divisor).round().clamp_(-128, 127);
      rope = rope.to(at::kBFloat16).to(at::kFloat) * kv_scale->view(-1)[0] / divisor;
      copy_reshaped(query_scale, scale);
    }
    query.copy_(absorbed.reshape(query.sizes()));
    query_rope.copy_(rope.reshape(query_rope.sizes()));
    if (kv_cache.numel() == 0) return;
    const int64_t least = index.min().item<int64_t>();
    rule("mla_prolog.slots", least >= 0, "cache_index has ", least,
        "; it must be in [0, blocks * block_size)");
    const auto keys = product(flat, down_key, x_scale, down_key_scale);
    const auto key =
        rms_normed(keys.narrow(-1, 0, latent), key_gamma, key_epsilon) * key_correction;
    const auto key_rope = rotate(
        halves_of_pairs(keys.narrow(-1, latent, rotary).view({count, 1, rotary})), c, s, false);
    write_cache(kv_cache, stored(key.view({1, count, 1, latent}), kv_cache, kv_scale, {}, false),
        index, mode);
    write_cache(rope_cache,
        stored(key_rope.view({1, count, 1, rotary}), rope_cache,
            rope_cache.scalar_type() == at::kChar ? rope_scale : std::nullopt, {}, false),
        index, mode);
  }
};

Computation prolog(Prolog p) {
  p.checked();
  return [p = std::move(p)]() mutable { p.run(); };
}

}  // namespace

// The weights are documented to be in FRACTAL_NZ; op-plugin's tests pass ND, as internal formats
// are off.
CHECKED(aclnnMlaPrologV2WeightNz,
    (Tensor x, Weight down_query, Weight up_query, Tensor up_key, Weight down_key,
        Tensor query_gamma, Tensor key_gamma, Tensor sin, Tensor cos, Tensor index, Tensor kv_cache,
        Tensor rope_cache, Opt<Tensor> x_scale, Opt<Tensor> down_query_scale,
        Opt<Tensor> up_query_scale, Opt<Tensor> down_key_scale, Opt<Tensor> kv_scale,
        Opt<Tensor> rope_scale, Opt<Tensor> smooth, double query_epsilon, double key_epsilon,
        Text mode, Tensor query, Tensor query_rope, Opt<Tensor> query_scale),
    {
      return prolog({x, down_query, up_query, up_key, down_key, query_gamma, key_gamma, sin, cos,
          index, kv_cache, rope_cache, x_scale, down_query_scale, up_query_scale, down_key_scale,
          kv_scale, rope_scale, smooth, query_epsilon, key_epsilon, mode, 1, 1, query, query_rope,
          query_scale, {}, {}});
    })

CHECKED(aclnnMlaPrologV3WeightNz,
    (Tensor x, Weight down_query, Weight up_query, Tensor up_key, Weight down_key,
        Tensor query_gamma, Tensor key_gamma, Tensor sin, Tensor cos, Tensor kv_cache,
        Tensor rope_cache, Opt<Tensor> index, Opt<Tensor> x_scale, Opt<Tensor> down_query_scale,
        Opt<Tensor> up_query_scale, Opt<Tensor> down_key_scale, Opt<Tensor> kv_scale,
        Opt<Tensor> rope_scale, Opt<Tensor> smooth, Opt<Tensor>, Opt<Tensor> clip,
        double query_epsilon, double key_epsilon, Text mode, int64_t weight_quant,
        int64_t cache_quant, int64_t query_quant, int64_t together, int64_t scales_together,
        int64_t, double query_correction, double key_correction, Tensor query, Tensor query_rope,
        Opt<Tensor> query_scale, Opt<Tensor> query_norm, Opt<Tensor> query_norm_scale),
    {
      return prolog({x, down_query, up_query, up_key, down_key, query_gamma, key_gamma, sin, cos,
          *index, kv_cache, rope_cache, x_scale, down_query_scale, up_query_scale, down_key_scale,
          kv_scale, rope_scale, smooth, query_epsilon, key_epsilon, mode, query_correction,
          key_correction, query, query_rope, query_scale, query_norm, query_norm_scale});
    })
