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

  // Sizes are those of the operator's page in torch_npu/_op_plugin_docs.py (torch_npu 2.13).
  // op-plugin's later page allows more: block sizes to 1024 and any number of tokens.
  Prolog& checked(std::initializer_list<int64_t> hidden_sizes) {
    one_of("token_x", x, {at::kBFloat16, at::kChar});
    rank("token_x", x, 2, 3);
    one_of<int64_t>("the hidden size of token_x", x.size(-1), hidden_sizes);
    within("the first dimension of token_x", x.size(0), 0, x.dim() == 2 ? 1048576 : 65536);
    if (x.dim() == 3) within("the sequence length of token_x", x.size(1), 0, 16);
    const bool small = x.scalar_type() == at::kChar;
    for (const auto& [name, w] : {std::pair<const char*, const Tensor*>{"weight_dq", &down_query},
             {"weight_dkv_kr", &down_key}}) {
      same_dtype(name, *w, "token_x", x);
      rank(name, *w, 2);
      require(w->size(0) == x.size(-1), name, " has shape ", w->sizes(),
          " and token_x a last dimension of ", x.size(-1));
    }
    one_of("weight_uq_qr", up_query, {at::kBFloat16, at::kChar});
    const bool small_up = up_query.scalar_type() == at::kChar;
    require(!small || small_up, "token_x is int8 and weight_uq_qr ", up_query.scalar_type(),
        "; it must be int8 too");
    one_of("weight_uk", up_key, {at::kBFloat16});
    rank("weight_uk", up_key, 3);
    const int64_t heads = up_key.size(0), low = down_query.size(1), tokens = x.numel() / x.size(-1);
    rotary = cos.size(-1);
    one_of<int64_t>("the number of heads", heads, {1, 2, 4, 8, 16, 32, 64, 128});
    one_of<int64_t>("the latent size of a query", low, {1536});
    one_of<int64_t>("the latent size of a key", up_key.size(2), {512});
    one_of<int64_t>("the head size without rotary embedding", up_key.size(1), {128});
    one_of<int64_t>("the head size with rotary embedding", rotary, {64});
    shape("weight_uq_qr", up_query, {low, heads * (up_key.size(1) + rotary)});
    shape("weight_dkv_kr", down_key, {x.size(-1), up_key.size(2) + rotary});
    for (const auto& [name, given, wanted, count] :
        {std::tuple<const char*, const Opt<Tensor>*, bool, int64_t>{
             "dequant_scale_x", &x_scale, small, tokens},
            {"dequant_scale_w_dq", &down_query_scale, small, low},
            {"dequant_scale_w_dkv_kr", &down_key_scale, small, down_key.size(1)},
            {"dequant_scale_w_uq_qr", &up_query_scale, small_up, up_query.size(1)}}) {
      require(given->has_value() == wanted, name,
          wanted ? " is needed with int8 weights" : " is given without int8 weights");
      if (wanted) floats(name, **given, {count});
    }
    require(!smooth || small_up, "smooth_scales_cq is given without int8 weights");
    if (smooth) floats("smooth_scales_cq", *smooth, {low, 1});
    for (const auto& [name, given] :
        {std::pair<const char*, const Tensor*>{"rmsnorm_gamma_cq", &query_gamma},
            {"rmsnorm_gamma_ckv", &key_gamma}, {"rope_sin", &sin}, {"rope_cos", &cos}})
      one_of(name, *given, {at::kBFloat16});
    shape("rmsnorm_gamma_cq", query_gamma, {low});
    shape("rmsnorm_gamma_ckv", key_gamma, {up_key.size(2)});
    auto angles = x.sizes().vec();
    angles.back() = rotary;
    shape("rope_sin", sin, angles);
    shape("rope_cos", cos, angles);
    one_of("cache_index", index, {at::kLong});
    shape("cache_index", index, x.sizes().slice(0, x.dim() - 1));
    mode = mode_of(mode_name, {"PA_BSND", "PA_NZ"});
    check_caches(small, small_up);
    return *this;
  }

  // The table of dtypes in op-plugin's docs/context/torch_npu-npu_mla_prolog_v2.md and _v3.md: an
  // int8 KV cache has one scale beside int8 inputs, and otherwise one a channel, in both caches.
  void check_caches(bool small, bool small_up) {
    rank("kv_cache", kv_cache, 4);
    rank("kr_cache", rope_cache, 4);
    one_of("kv_cache", kv_cache, {at::kBFloat16, at::kChar});
    const bool small_cache = kv_cache.scalar_type() == at::kChar;
    require(!small_cache || small_up, "kv_cache is int8 and weight_uq_qr ", up_query.scalar_type(),
        "; it must be int8 too");
    one_of("kr_cache", rope_cache, {small_cache && !small ? at::kChar : at::kBFloat16});
    require(small_cache == kv_scale.has_value(), "kv_cache is ", kv_cache.scalar_type(),
        "; int8 goes with quant_scale_ckv, and nothing else does");
    require((rope_cache.scalar_type() == at::kChar) == rope_scale.has_value(), "kr_cache is ",
        rope_cache.scalar_type(), "; int8 goes with quant_scale_ckr, and nothing else does");
    if (kv_scale)
      floats("quant_scale_ckv", *kv_scale, {up_key.size(2), small ? 1 : up_key.size(2)});
    if (rope_scale) floats("quant_scale_ckr", *rope_scale, {rotary});
    if (kv_cache.numel() == 0) return;
    require(kv_cache.size(2) == 1 && kv_cache.size(3) == up_key.size(2), "kv_cache has shape ",
        kv_cache.sizes(), "; [blocks, block_size, 1, ", up_key.size(2), "] is expected");
    shape("kr_cache", rope_cache, {kv_cache.size(0), kv_cache.size(1), 1, rotary});
    one_of<int64_t>("the block size", kv_cache.size(1), {16, 128});
  }

  static void floats(const char* name, const Tensor& scale, std::initializer_list<int64_t> counts) {
    one_of(name, scale, {at::kFloat});
    one_of<int64_t>((name + std::string("'s number of elements")).c_str(), scale.numel(), counts);
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
    const auto copy_if_given = [](const Opt<Tensor>& out, const Tensor& value) {
      if (out && out->numel()) Tensor(*out).copy_(value.reshape(out->sizes()));
    };
    if (query_norm && query_norm->numel() == normed.numel()) copy_if_given(query_norm, normed);
    if (query_norm_scale && normed_scale && query_norm_scale->numel() == count)
      copy_if_given(query_norm_scale, *normed_scale);
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
      copy_if_given(query_scale, scale);
    }
    query.copy_(absorbed.reshape(query.sizes()));
    query_rope.copy_(rope.reshape(query_rope.sizes()));
    if (kv_cache.numel() == 0) return;
    const int64_t least = index.min().item<int64_t>();
    require(least >= 0, "cache_index has ", least, "; it must be in [0, blocks * block_size)");
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

Computation prolog(Prolog p, std::initializer_list<int64_t> hidden_sizes) {
  p.checked(hidden_sizes);
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
                        index, kv_cache, rope_cache, x_scale, down_query_scale, up_query_scale,
                        down_key_scale, kv_scale, rope_scale, smooth, query_epsilon, key_epsilon,
                        mode, 1, 1, query, query_rope, query_scale, {}, {}},
          {7168});
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
      require(index.has_value(), "cache_index is needed");
      one_of<int64_t>("weight_quant_mode", weight_quant, {0, 1, 2});
      one_of<int64_t>("kv_cache_quant_mode (3, by tiles, is not emulated)", cache_quant, {0, 1, 2});
      one_of<int64_t>("ckvkr_repo_mode (1, both in one cache, is not emulated)", together, {0});
      one_of<int64_t>("quant_scale_repo_mode (1 is not emulated)", scales_together, {0});
      // The table of modes in op-plugin's page. It has weight_quant_mode 2 for bfloat16 inputs with
      // an int8 KV cache, and 1 for an int8 weight_uq_qr.
      const bool small = x.scalar_type() == at::kChar,
                 small_up = up_query.scalar_type() == at::kChar;
      const bool small_cache = kv_cache.scalar_type() == at::kChar;
      const int64_t quantized = small ? 2 : small_up;
      require(weight_quant == quantized || (quantized == 1 && small_cache && weight_quant == 2),
          "weight_quant_mode is ", weight_quant,
          "; it must be 0 for bfloat16 weights, 1 for an int8 weight_uq_qr and 2 for an int8 "
          "token_x");
      require(cache_quant == (small_cache ? (small ? 1 : 2) : 0), "kv_cache_quant_mode is ",
          cache_quant,
          "; it must be 0 for a bfloat16 kv_cache, and for int8 1 beside an int8 token_x and 2 "
          "otherwise");
      one_of<int64_t>("query_quant_mode", query_quant, {cache_quant == 1});
      require(!clip, "k_nope_clip_alpha is given; it goes with kv_cache_quant_mode 3");
      return prolog(
          {x, down_query, up_query, up_key, down_key, query_gamma, key_gamma, sin, cos, *index,
              kv_cache, rope_cache, x_scale, down_query_scale, up_query_scale, down_key_scale,
              kv_scale, rope_scale, smooth, query_epsilon, key_epsilon, mode, query_correction,
              key_correction, query, query_rope, query_scale, query_norm, query_norm_scale},
          {6144, 7168, 7680});
    })
