// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Rotary embeddings. Semantics and limits: torch_npu's documentation of npu_rotary_mul, npu_mrope
// and npu_apply_rotary_pos_emb (torch_npu/_op_plugin_docs.py), and the golden functions of
// op-plugin's tests; argument order: op-plugin's call sites.
#include <numeric>

#include "core/cost.h"
#include "ops/rows/rows.h"
#include "rotary_embedding.h"

namespace emu {
namespace {

// Angles of each token from three or four rows of positions: consecutive or interleaved sections.
Tensor merged(
    const Tensor& positions, const Tensor& cache, const Ints& sections, bool taking_turns) {
  const auto where = positions.to(at::kLong);
  const int64_t limit = cache.size(0), half = cache.size(1) / 2;
  require(where.numel() == 0 ||
              (where.min().item<int64_t>() >= 0 && where.max().item<int64_t>() < limit),
      "a position is outside the cos/sin cache of ", limit, " rows");
  auto owner = at::zeros({half}, at::kLong);
  if (taking_turns) {
    for (int64_t row = 1; row < 3; ++row)
      for (int64_t i = row; i < std::min(half, sections[row] * 3); i += 3) owner[i].fill_(row);
  } else {
    int64_t first = 0;
    for (size_t row = 0; row < sections.size(); first += sections[row++])
      owner.narrow(0, first, sections[row]).fill_(static_cast<int64_t>(row));
  }
  const auto rows = cache.index_select(0, where.reshape(-1)).view({where.size(0), -1, 2, half});
  return rows.gather(0, owner.view({1, 1, 1, half}).expand({1, rows.size(1), 2, half}))
      .reshape({-1, 2 * half});
}

// The batch and the heads are the dimensions over which the angles are broadcast.
void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  rule("rotary_mul.broadcast", [&] {
    for (const auto& [name, angles] : {std::pair{"r1", &cos}, std::pair{"r2", &sin}})
      require(at::is_expandable_to(angles->sizes(), x.sizes()) && angles->size(-1) == x.size(-1),
          name, " has shape ", angles->sizes(), ", which does not broadcast to input's ",
          x.sizes());
  });
  rule("rotary_mul.batch-and-heads", [&] {
    int64_t product = 1;
    for (int64_t dim = 0; dim < x.dim() - 1; ++dim) {
      if (cos.size(dim) != 1) continue;
      require(x.size(dim) < 1000, "dimension ", dim, " of input is ", x.size(dim),
          "; B and N must be below 1000");
      product *= x.size(dim);
    }
    require(!interleaved || product < 1000, "B * N is ", product,
        "; with rotary_mode interleave it must be below 1000");
  });
}

}  // namespace

// (-x2, x1) of the two halves, or of adjacent pairs.
Tensor rotated(const Tensor& x, bool interleaved) {
  if (!interleaved) {
    const auto halves = x.chunk(2, -1);
    return at::concat({-halves[1], halves[0]}, -1);
  }
  const auto pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const auto fp32 = x.to(at::kFloat);
  return fp32 * cos.to(at::kFloat) + rotated(fp32, interleaved) * sin.to(at::kFloat);
}

}  // namespace emu

// mode: 0 half, 1 interleave (op-plugin's RotaryMulKernelNpuOpApi.cpp).
CHECKED(aclnnRotaryPositionEmbeddingV2,
    (Tensor x, Tensor cos, Tensor sin, int64_t mode, Opt<Tensor> rotation, Tensor out), {
      check_angles(x, cos, sin, mode == 1);
      COMPUTE {
        if (!rotation) {
          out.copy_(rotate(x, cos, sin, mode == 1));
          return;
        }
        const auto fp32 = x.to(at::kFloat);
        out.copy_(fp32 * cos.to(at::kFloat) +
                  at::matmul(fp32, rotation->to(at::kFloat)) * sin.to(at::kFloat));
      };
    })
CHECKED(aclnnRotaryPositionEmbedding, (Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor out),
    { return body_aclnnRotaryPositionEmbeddingV2(x, cos, sin, mode, {}, out); })
CHECKED(aclnnRotaryPositionEmbeddingGrad,
    (Tensor grad, Tensor cos, Tensor sin, Opt<Tensor> x, int64_t mode, Tensor x_grad,
        Tensor cos_grad, Tensor sin_grad),
    {
      check_angles(grad, cos, sin, mode == 1);
      COMPUTE {
        const auto g = grad.to(at::kFloat), by_sin = g * sin.to(at::kFloat);
        // The transposed rotation.
        x_grad.copy_(g * cos.to(at::kFloat) - rotated(by_sin, mode == 1));
        if (!x || x->numel() == 0) return;
        const auto fp32 = x->to(at::kFloat);
        cos_grad.copy_(at::sum_to(g * fp32, cos.sizes()));
        sin_grad.copy_(at::sum_to(g * rotated(fp32, mode == 1), sin.sizes()));
      };
    })

// In place.
CHECKED(aclnnApplyRotaryPosEmbV2,
    (Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout, Text mode), {
      COMPUTE {
        query.copy_(rotate(query, cos, sin, false));
        key.copy_(rotate(key, cos, sin, false));
      };
    })
CHECKED(aclnnApplyRotaryPosEmb, (Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout),
    { return body_aclnnApplyRotaryPosEmbV2(query, key, cos, sin, layout, ""); })

// Adjacent pairs are split into halves first, also in the result (vLLM's use in MLA, and the golden
// function of test_npu_kv_rms_norm_rope_cache.py).
CHECKED(aclnnInterleaveRope, (Tensor x, Tensor cos, Tensor sin, Tensor out), {
  for (const auto& [name, angles] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
    require(at::is_expandable_to(angles->sizes(), x.sizes()), name, " has shape ", angles->sizes(),
        ", which does not broadcast to x's ", x.sizes());
  }
  COMPUTE { out.copy_(rotate(halves_of_pairs(x.to(at::kFloat)), cos, sin, false)); };
})

CHECKED(aclnnRopeWithSinCosCacheV2,
    (Tensor positions, Tensor query, Tensor key, Tensor cache, Opt<Ints> sections,
        int64_t head_size, bool neox, int64_t cache_mode, Tensor query_out, Tensor key_out),
    {
      rule("mrope.heads",
          head_size > 0 && query.size(1) % head_size == 0 && key.size(1) % head_size == 0,
          "head_size is ", head_size, ", of which query's ", query.size(1), " and key's ",
          key.size(1), " are no multiples");
      const int64_t rotary = cache.size(1);
      rule("mrope.head-size", [&] {
        multiple("head_size", head_size, query.scalar_type() == at::kFloat ? 16 : 32);
        require(rotary <= head_size, "rotary_dim is ", rotary, " and head_size ", head_size,
            "; it must not be larger");
      });
      const auto check_sections = [&] {
        const int64_t rows = positions.size(0);
        require(sections && static_cast<int64_t>(sections->size()) == rows &&
                    std::accumulate(sections->begin(), sections->end(), int64_t{0}) == rotary / 2,
            "mrope_section is [", listed(sections.value_or(Ints())), "]; ", rows,
            " numbers with the sum ", rotary / 2, " are needed for ", rows, " rows of positions");
        const bool known = *sections == Ints{16, 24, 24} || *sections == Ints{24, 20, 20} ||
                           *sections == Ints{8, 12, 12} || *sections == Ints{16, 16, 16, 16};
        require(known, "mrope_section is [", listed(*sections),
            "]; [16, 24, 24], [24, 20, 20], [8, 12, 12] and [16, 16, 16, 16] are allowed");
        require(rows == 3 || cache_mode == 0, "cache_mode is interleave with ", rows,
            " rows of positions; they need default");
      };
      if (positions.dim() == 2) rule("mrope.sections", check_sections);
      require(query.stride(-1) == 1 && key.stride(-1) == 1 && query_out.is_contiguous() &&
                  key_out.is_contiguous(),
          "rows must be contiguous");
      COMPUTE {
        auto where = positions.to(at::kLong).contiguous();
        auto table = cache.contiguous();
        cost::partial_access(
            cache, static_cast<double>(positions.numel() * cache.size(1) * cache.element_size()));
        if (positions.dim() == 2) {
          table = merged(positions, table, *sections, cache_mode == 1).contiguous();
          where = at::arange(query.size(0));
        }
        rope_rows(where, query, table, head_size, neox, query_out);
        rope_rows(where, key, table, head_size, neox, key_out);
      };
    })
CHECKED(aclnnRopeWithSinCosCache,
    (Tensor positions, Tensor query, Tensor key, Tensor cache, Opt<Ints> sections,
        int64_t head_size, bool neox, Tensor query_out, Tensor key_out),
    {
      return body_aclnnRopeWithSinCosCacheV2(
          positions, query, key, cache, sections, head_size, neox, 0, query_out, key_out);
    })
