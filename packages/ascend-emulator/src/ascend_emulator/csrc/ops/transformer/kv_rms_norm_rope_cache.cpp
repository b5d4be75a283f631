// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Fused RMSNorm, rotary embedding and KV cache write. Semantics: the golden functions of
// op-plugin's test_npu_kv_rms_norm_rope_cache.py and test_npu_qkv_rms_norm_rope_cache.py; shapes:
// torch_npu/op_plugin/meta/_meta_registrations.py.
#include "kv_rms_norm_rope_cache.h"

namespace emu {

Tensor rms_normed(const Tensor& x, const Tensor& gamma, double epsilon) {
  const auto fp32 = x.to(at::kFloat);
  return fp32 * (fp32.square().mean(-1, true) + epsilon).rsqrt() * gamma.to(at::kFloat);
}

// Converts to the cache's dtype: int8 with scale and offset, or rounding.
Tensor stored(const Tensor& x, const Tensor& cache, const Opt<Tensor>& scale,
    const Opt<Tensor>& offset, bool divides) {
  if (!scale) return x.to(cache.scalar_type());
  auto out = divides ? x / scale->to(at::kFloat) : x * scale->to(at::kFloat);
  if (offset) out = out + offset->to(at::kFloat);
  return out.round().clamp_(-128, 127).to(at::kChar);
}

CacheMode mode_of(const Text& name, std::initializer_list<Text> allowed) {
  one_of<Text>("cache_mode", name, allowed);
  return {name == "Norm"                          ? Places::sequence
          : name.find("BLK") != std::string::npos ? Places::pages
                                                  : Places::slots,
      name.find("NZ") != std::string::npos};
}

// rows [B, S, heads, D] into a cache of [blocks, block_size, heads, D], whose memory in fractal
// order is [blocks, heads * D / c, block_size, c], or, in mode Norm, of [B, heads, positions, D] at
// index [B, S].
void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& index, CacheMode mode) {
  const int64_t batch = rows.size(0), length = rows.size(1), values = rows.size(2) * rows.size(3);
  auto where = index.to(at::kLong).reshape(-1);
  if (mode.places == Places::sequence) {
    const auto request = at::arange(batch).repeat_interleave(length);
    const auto used = (where >= 0).nonzero().squeeze(-1);
    require(where.numel() == 0 || where.max().item<int64_t>() < cache.size(2),
        "an index is outside the cache of ", cache.size(2), " places");
    put_rows(cache.transpose(1, 2), {request.index_select(0, used), where.index_select(0, used)},
        rows.reshape({-1, rows.size(2), rows.size(3)}).index_select(0, used));
    cost::partial_access(cache, static_cast<double>(used.numel() * values * cache.element_size()));
    return;
  }
  // Of [blocks, block_size, heads, D], or [blocks, heads * D / c, block_size, c].
  const int64_t block_size = cache[0].numel() / values;
  if (mode.places == Places::pages) {  // one index per page, filled from its start
    const int64_t pages = (length + block_size - 1) / block_size;
    const auto first = where.view({batch, pages})
                           .index_select(1, at::floor_divide(at::arange(length), block_size));
    where = at::where(first < 0, first,
        at::floor_divide(first, block_size) * block_size + at::arange(length).remainder(block_size))
                .reshape(-1);
  }
  const int64_t blocks = cache.size(0);
  require(where.numel() == 0 || where.max().item<int64_t>() < blocks * block_size,
      "an index is outside the cache of ", blocks * block_size, " places");
  const auto used = (where >= 0).nonzero().squeeze(-1);
  cost::partial_access(cache, static_cast<double>(used.numel() * values * cache.element_size()));
  const auto block = at::floor_divide(where, block_size).index_select(0, used),
             place = where.remainder(block_size).index_select(0, used);
  const int64_t unit = mode.fractal ? 32 / cache.element_size() : values;
  const auto view = mode.fractal
                        ? cache.view({blocks, values / unit, block_size, unit}).transpose(1, 2)
                        : cache.view({blocks, block_size, 1, values});
  put_rows(view, {block, place}, rows.reshape({-1, values / unit, unit}).index_select(0, used));
}

}  // namespace emu

namespace {

using namespace emu;

void check_cache(const char* name, const Tensor& cache, const Tensor& like,
    const Opt<Tensor>& scale, int64_t size, const Text& mode) {
  if (scale) one_of(name, cache, {at::kChar});
  else same_dtype(name, cache, "kv", like);
  if (mode != "Norm")
    require(cache.numel() == cache.size(0) * (cache.numel() / cache.size(0)) &&
                (cache.numel() / cache.size(0)) % size == 0,
        name, " has shape ", cache.sizes(), "; a block must hold rows of ", size);
  else
    require(cache.size(3) == size, name, " has shape ", cache.sizes(),
        "; its last dimension must be ", size);
  if (mode.find("NZ") != std::string::npos) multiple(name, size, 32 / cache.element_size());
}

}  // namespace

// kv [B, 1, S, ckv + 64]; the first part is normalized and the last 64 rotated. With v, all of kv
// is normalized, its first 64 rotated, and v written.
CHECKED(aclnnKvRmsNormRopeCacheV2,
    (Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache,
        Tensor ckv_cache, Opt<Tensor> k_scale, Opt<Tensor> ckv_scale, Opt<Tensor> k_offset,
        Opt<Tensor> ckv_offset, Opt<Tensor> v, double epsilon, Text cache_mode, bool outputs,
        Tensor k_out, Tensor ckv_out),
    {
      const int64_t rope = cos.size(-1), normed = gamma.size(0);
      require(kv.size(3) == (v ? normed : normed + rope), "kv has a last dimension of ", kv.size(3),
          "; gamma's ", normed, v ? "" : text(" and cos's ", rope), " are expected");
      for (const auto& [name, x] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
        require(x->size(0) == kv.size(0) && (x->size(2) == kv.size(2) || x->size(2) == 1) &&
                    x->size(3) == rope,
            name, " has shape ", x->sizes(), " and kv ", kv.sizes());
      }
      const auto mode =
          mode_of(cache_mode, {"Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"});
      check_cache("k_cache", k_cache, kv, k_scale, v ? normed : rope, cache_mode);
      check_cache("ckv_cache", ckv_cache, kv, ckv_scale, v ? v->size(3) : normed, cache_mode);
      require((!k_offset || k_scale) && (!ckv_offset || ckv_scale),
          "an offset is given without its scale");
      if (mode.places == Places::pages) {
        const int64_t block_size = k_cache.size(1),
                      pages = kv.size(0) * ((kv.size(2) + block_size - 1) / block_size);
        require(index.numel() == pages, "index has ", index.numel(), " entries; one for each of ",
            pages, " pages is expected");
      } else {
        require(index.numel() == kv.size(0) * kv.size(2), "index has ", index.numel(),
            " entries for ", kv.size(0) * kv.size(2), " tokens");
      }
      COMPUTE {
        Tensor key, value;
        if (v) {
          const auto all = rms_normed(kv, gamma, epsilon);
          key = at::concat({rotate(halves_of_pairs(all.narrow(-1, 0, rope)), cos, sin, false),
                               all.narrow(-1, rope, normed - rope)},
              -1);
          value = v->to(at::kFloat);
        } else {
          value = rms_normed(kv.narrow(-1, 0, normed), gamma, epsilon);
          key =
              rotate(halves_of_pairs(kv.narrow(-1, normed, rope).to(at::kFloat)), cos, sin, false);
        }
        write_cache(
            k_cache, stored(key, k_cache, k_scale, k_offset, false).transpose(1, 2), index, mode);
        write_cache(ckv_cache,
            stored(value, ckv_cache, ckv_scale, ckv_offset, false).transpose(1, 2), index, mode);
        if (outputs) {
          k_out.copy_(key);
          ckv_out.copy_(value);
        } else {
          cost::partial_access(k_out, 0.0);
          cost::partial_access(ckv_out, 0.0);
        }
      };
    })
CHECKED(aclnnKvRmsNormRopeCache,
    (Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache,
        Tensor ckv_cache, Opt<Tensor> k_scale, Opt<Tensor> ckv_scale, Opt<Tensor> k_offset,
        Opt<Tensor> ckv_offset, double epsilon, Text cache_mode, bool outputs, Tensor k_out,
        Tensor ckv_out),
    {
      return body_aclnnKvRmsNormRopeCacheV2(kv, gamma, cos, sin, index, k_cache, ckv_cache, k_scale,
          ckv_scale, k_offset, ckv_offset, {}, epsilon, cache_mode, outputs, k_out, ckv_out);
    })

// qkv [B * S, (Nq + Nk + Nv) * D]: q and k are normalized and rotated by halves; k and v go to
// caches [blocks, N * D / c, block_size, c].
CHECKED(aclnnQkvRmsNormRopeCache,
    (Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, Tensor index, Tensor q_out,
        Tensor k_cache, Tensor v_cache, Opt<Tensor> k_scale, Opt<Tensor> v_scale,
        Opt<Tensor> k_offset, Opt<Tensor> v_offset, Ints size, Ints heads, double epsilon,
        Text cache_mode, Opt<Tensor> q_before, Opt<Tensor> k_before, Opt<Tensor> v_before),
    {
      require(size.size() == 4 && heads.size() == 3, "qkv_size has ", size.size(),
          " entries and head_nums ", heads.size(), "; 4 and 3 are needed");
      require(heads[0] + heads[1] + heads[2] == size[2] && qkv.size(0) == size[0] * size[1] &&
                  qkv.size(1) == size[2] * size[3],
          "qkv has shape ", qkv.sizes(), ", qkv_size is [", listed(size), "] and head_nums [",
          listed(heads), "]");
      require(index.numel() == qkv.size(0), "index has ", index.numel(), " entries for ",
          qkv.size(0), " tokens");
      for (const auto& [name, x] : {std::pair{"q_gamma", &q_gamma}, std::pair{"k_gamma", &k_gamma}})
        shape(name, *x, {size[3]});
      for (const auto& [name, x] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}})
        shape(name, *x, {qkv.size(0), size[3]});
      shape("q_out", q_out, {qkv.size(0), heads[0] * size[3]});
      check_cache("k_cache", k_cache, qkv, k_scale, heads[1] * size[3], cache_mode);
      check_cache("v_cache", v_cache, qkv, v_scale, heads[2] * size[3], cache_mode);
      COMPUTE {
        const auto split =
            qkv.to(at::kFloat).view({1, qkv.size(0), size[2], size[3]}).split_with_sizes(heads, 2);
        const auto c = cos.view({1, -1, 1, size[3]}), s = sin.view({1, -1, 1, size[3]});
        const auto q = rotate(rms_normed(split[0], q_gamma, epsilon), c, s, false),
                   k = rotate(rms_normed(split[1], k_gamma, epsilon), c, s, false);
        q_out.copy_(q.view(q_out.sizes()));
        write_cache(
            k_cache, stored(k, k_cache, k_scale, k_offset, true), index, {Places::slots, true});
        write_cache(v_cache, stored(split[2], v_cache, v_scale, v_offset, true), index,
            {Places::slots, true});
        copy_reshaped(q_before, q);
        copy_reshaped(k_before, k);
        copy_reshaped(v_before, split[2]);
      };
    })
