// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Manifold-constrained hyper-connections on Ascend950: n streams of the residual [..., n, D], mixed
// by matrices of each token. Semantics and limits: op-plugin's pages of npu_mhc_pre, npu_mhc_post
// and npu_mhc_sinkhorn (docs/zh/custom_APIs/torch_npu, BSD).
#include "operator/op.h"

using namespace emu;

namespace {

// HF32: float32 with 10 stored bits of the mantissa, rounded half up (the reference of op-plugin's
// test_npu_mhc_pre.py).
Tensor in_hf32(const Tensor& x) {
  const auto bits = x.contiguous().view(at::kInt);
  return bits.bitwise_right_shift(12).add(1).bitwise_right_shift(1).bitwise_left_shift(13).view(
      at::kFloat);
}

}  // namespace

CHECKED(aclnnMhcPreV2,
    (Tensor x, Tensor phi, Tensor alpha, Tensor bias, Opt<Tensor> gamma, double norm_eps,
        double hc_eps, int64_t inner_precise, Tensor h_in, Tensor h_post, Tensor h_res,
        Opt<Tensor> inv_rms, Opt<Tensor> h_mix, Opt<Tensor> h_pre),
    {
      const int64_t n = x.size(-2), width = n * x.size(-1);
      const bool residual = alpha.numel() == 3;
      const int64_t rows = residual ? n * n + 2 * n : 2 * n;
      rule("mhc_pre.shapes", [&] {
        shape("phi", phi, {rows, width});
        shape("bias", bias, {rows});
        if (gamma) shape("gamma", *gamma, {n, x.size(-1)});
      });
      COMPUTE {
        const auto streams = x.to(at::kFloat), flat = streams.flatten(-2);
        const auto rstd = (flat.square().mean(-1, true) + norm_eps).rsqrt();
        const auto scaled = gamma ? flat * gamma->reshape({width}) : flat;
        const auto mix = inner_precise ? at::matmul(in_hf32(scaled), in_hf32(phi).t())
                                       : at::matmul(scaled, phi.t());
        const auto weights = mix * rstd;
        const auto part = [&](int64_t index, int64_t first, int64_t count) {
          return weights.narrow(-1, first, count) * alpha[index] + bias.narrow(0, first, count);
        };
        const auto pre = at::sigmoid(part(0, 0, n)) + hc_eps;
        h_in.copy_((pre.unsqueeze(-1) * streams).sum(-2));
        h_post.copy_(2 * at::sigmoid(part(1, n, n)));
        if (residual) h_res.copy_(part(2, 2 * n, n * n).unflatten(-1, {n, n}));
        else h_res.zero_();
        if (inv_rms) inv_rms->copy_(rstd.squeeze(-1));
        if (h_mix) h_mix->copy_(mix);
        if (h_pre) h_pre->copy_(pre);
      };
    })
CHECKED(aclnnMhcPre,
    (Tensor x, Tensor phi, Tensor alpha, Tensor bias, Opt<Tensor> gamma, double norm_eps,
        double hc_eps, Tensor h_in, Tensor h_post, Tensor h_res, Opt<Tensor> inv_rms,
        Opt<Tensor> h_mix, Opt<Tensor> h_pre),
    {
      return body_aclnnMhcPreV2(x, phi, alpha, bias, gamma, norm_eps, hc_eps, 0, h_in, h_post,
          h_res, inv_rms, h_mix, h_pre);
    })

// The streams, mixed by the transposed matrix, and the output of the layer weighted for each.
CHECKED(aclnnMhcPost, (Tensor x, Opt<Tensor> h_res, Tensor h_out, Tensor h_post, Tensor out), {
  rule("mhc_post.shapes", [&] {
    auto sizes = x.sizes().vec();
    const int64_t n = x.size(-2);
    sizes.erase(sizes.end() - 2);
    shape("h_out", h_out, sizes);
    sizes.back() = n;
    shape("h_post", h_post, sizes);
    sizes.push_back(n);
    if (h_res) shape("h_res", *h_res, sizes);
  });
  COMPUTE {
    const auto streams = x.to(at::kFloat);
    out.copy_((h_res ? at::matmul(h_res->transpose(-1, -2), streams) : streams) +
              h_post.unsqueeze(-1) * h_out.to(at::kFloat).unsqueeze(-2));
  };
})

// The intermediate results are in tiles of the cores, of which no page has the sizes.
CHECKED(aclnnMhcSinkhorn,
    (Tensor x, float eps, int64_t num_iters, Tensor out, Opt<Tensor> norms, Opt<Tensor> sums), {
      rule("mhc_sinkhorn.square", x.size(-1) == x.size(-2), "x has shape ", x.sizes(),
          "; its last two dimensions must be equal");
      require_emulated(!norms && !sums, "out_flag 1 is not emulated");
      COMPUTE {
        auto matrix = at::softmax(x, -1) + eps;
        matrix = matrix / (matrix.sum(-2, true) + eps);
        for (int64_t i = 1; i < num_iters; ++i) {
          matrix = matrix / (matrix.sum(-1, true) + eps);
          matrix = matrix / (matrix.sum(-2, true) + eps);
        }
        out.copy_(matrix);
      };
    })
