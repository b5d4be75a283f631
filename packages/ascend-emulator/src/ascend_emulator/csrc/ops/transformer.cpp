// Fused pieces of a transformer layer: gated activations and rotary embeddings. Semantics: torch_npu's documentation of
// npu_swiglu, npu_rotary_mul, npu_mrope and npu_apply_rotary_pos_emb (torch_npu/_op_plugin_docs.py, BSD).
#include <ATen/Parallel.h>

#include "../core/op.h"

namespace {

using at::Tensor;
using emu::check;
using emu::kOpParam;

template <class T>
void swiglu_rows(const T* x, T* out, int64_t rows, int64_t half) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / half), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* gate = x + row * 2 * half;
      const T* up = gate + half;
      for (int64_t i = 0; i < half; ++i) {
        const float g = gate[i];
        out[row * half + i] = static_cast<T>(g / (1.0f + std::exp(-g)) * float(up[i]));
      }
    }
  });
}

void swiglu(const Tensor& x, int64_t dim, Tensor& out) {
  const int64_t at_dim = at::maybe_wrap_dim(dim, x.dim());
  check(x.size(at_dim) % 2 == 0, kOpParam, "dimension ", dim, " has size ", x.size(at_dim), "; it must be even");
  // The plain loop saves launches on few values; ATen's exponential is vectorized.
  if (at_dim != x.dim() - 1 || !x.is_contiguous() || !out.is_contiguous() || x.numel() > 16384) {
    const auto halves = x.to(at::kFloat).chunk(2, at_dim);
    out.copy_(at::silu(halves[0]).mul_(halves[1]));
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "swiglu", [&] {
    swiglu_rows(x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), out.numel() / out.size(-1), out.size(-1));
  });
}

// (-x2, x1) of the two halves, or of neighbouring pairs.
Tensor rotated(const Tensor& x, bool interleaved) {
  if (!interleaved) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const auto pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const auto wide = x.to(at::kFloat);
  return (wide * cos.to(at::kFloat) + rotated(wide, interleaved) * sin.to(at::kFloat)).to(x.scalar_type());
}

// One head's first `rotary` values: cache rows hold cos then sin of rotary / 2 angles.
template <class T>
void rope_heads(const T* in, T* out, const T* cos, const T* sin, int64_t heads, int64_t head_size, int64_t half, bool neox) {
  for (int64_t head = 0; head < heads; ++head, in += head_size, out += head_size) {
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
      const float x = in[a], y = in[b], c = cos[i], s = sin[i];
      out[a] = static_cast<T>(x * c - y * s);
      out[b] = static_cast<T>(y * c + x * s);
    }
    for (int64_t i = 2 * half; i < head_size; ++i) out[i] = in[i];
  }
}

template <class T>
void rope(const Tensor& positions, const Tensor& x, const Tensor& cache, int64_t head_size, bool neox, Tensor& out) {
  const int64_t tokens = x.size(0), heads = x.size(1) / head_size, half = cache.size(1) / 2, limit = cache.size(0);
  const auto* where = positions.const_data_ptr<int64_t>();
  const T* table = cache.const_data_ptr<T>();
  const T* in = x.const_data_ptr<T>();
  T* result = out.mutable_data_ptr<T>();
  const int64_t stride = x.stride(0);
  at::parallel_for(0, tokens, 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      check(where[t] >= 0 && where[t] < limit, kOpParam, "position ", where[t], " is outside the cos/sin cache of ", limit, " rows");
      const T* row = table + where[t] * 2 * half;
      rope_heads(in + t * stride, result + t * out.stride(0), row, row + half, heads, head_size, half, neox);
    }
  });
}

}  // namespace

OP(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), { swiglu(x, dim, out); })

// mode: 0 half, 1 interleave (op-plugin's RotaryMulKernelNpuOpApi.cpp).
OP(aclnnRotaryPositionEmbeddingV2, (Tensor x, Tensor cos, Tensor sin, int64_t mode, Opt<Tensor> rotation, Tensor out), {
  check(mode == 0 || mode == 1, kOpParam, "rotary mode ", mode, "; 0 half and 1 interleave are there");
  check(!rotation, kOpParam, "a rotation matrix (rotate) is not emulated");
  out.copy_(rotate(x, cos, sin, mode == 1));
})

OP(aclnnApplyRotaryPosEmbV2, (Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout, Text mode), {
  // On A2 and A3: layout BSND (1) or TND (4), head size 64 or 128, rotary mode half.
  check(layout == 1 || layout == 4, kOpParam, "layout ", layout, "; BSND (1) and TND (4) are there");
  check(mode == "half", kOpParam, "rotary mode '", mode, "'; half is there");
  for (const auto* x : {&key, &cos, &sin})
    check(x->scalar_type() == query.scalar_type(), kOpParam, "query is ", query.scalar_type(), ", another argument ", x->scalar_type(), "; they must be the same");
  const auto size = query.size(-1);
  check(size == 64 || size == 128, kOpParam, "head size ", size, "; 64 and 128 are allowed");
  query.copy_(rotate(query, cos, sin, false));
  key.copy_(rotate(key, cos, sin, false));
})

namespace {
// torch_npu.npu_mrope with one-dimensional positions; positions of three rows (multimodal sections) come with the models that need them.
void rope_with_cache(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cache, int64_t head_size, bool neox, Tensor& query_out, Tensor& key_out) {
  check(positions.dim() == 1, kOpParam, "positions have ", positions.dim(), " dimensions; only plain rotary embedding (1) is emulated, not multimodal sections");
  check(cache.scalar_type() == query.scalar_type() && key.scalar_type() == query.scalar_type(), kOpParam, "query, key and cos_sin_cache are ",
        query.scalar_type(), ", ", key.scalar_type(), " and ", cache.scalar_type(), "; they must be the same");
  const int64_t rotary = cache.size(1), unit = query.scalar_type() == at::kFloat ? 16 : 32;
  check(rotary % unit == 0, kOpParam, "rotary_dim ", rotary, " is no multiple of ", unit, " as ", query.scalar_type(), " wants");
  check(query.stride(-1) == 1 && key.stride(-1) == 1 && query_out.is_contiguous() && key_out.is_contiguous(), kOpParam, "rows must be contiguous");
  const auto where = positions.to(at::kLong).contiguous();
  const auto table = cache.contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, query.scalar_type(), "rope", [&] {
    rope<scalar_t>(where, query, table, head_size, neox, query_out);
    rope<scalar_t>(where, key, table, head_size, neox, key_out);
  });
}
}  // namespace
// cache_mode tells how the three sections of a multimodal cache lie, so it is without effect here.
OP(aclnnRopeWithSinCosCacheV2, (Tensor positions, Tensor query, Tensor key, Tensor cache, Opt<Ints>, int64_t head_size, bool neox, int64_t, Tensor query_out, Tensor key_out), {
  rope_with_cache(positions, query, key, cache, head_size, neox, query_out, key_out);
})
