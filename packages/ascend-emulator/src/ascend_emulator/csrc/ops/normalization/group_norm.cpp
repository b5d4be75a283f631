// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// GroupNorm, with optional activation, and gradients. Rules: torch_npu's documentation of
// npu_group_norm_silu and npu_group_norm_swish (torch_npu/_op_plugin_docs.py), and the golden
// functions of op-plugin's tests; argument order: op-plugin's call sites.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {

using namespace emu;

struct GroupNormed {
  Tensor y, mean, rstd;
};
GroupNormed group(const Tensor& x, const Opt<Tensor>& weight, const Opt<Tensor>& bias,
    int64_t groups, double epsilon) {
  const auto fp32 = x.to(at::kFloat).reshape({x.size(0), groups, -1});
  const auto mean = fp32.mean(-1, true), centered = fp32 - mean,
             rstd = (centered.square().mean(-1, true) + epsilon).rsqrt();
  auto y = (centered * rstd).reshape(x.sizes());
  Ints by_channel(x.dim(), 1);
  by_channel[1] = x.size(1);
  if (weight) y = y * weight->to(at::kFloat).view(by_channel);
  if (bias) y = y + bias->to(at::kFloat).view(by_channel);
  return {y, mean.squeeze(-1), rstd.squeeze(-1)};
}

void check_groups(
    const Tensor& x, const Opt<Tensor>& weight, const Opt<Tensor>& bias, int64_t groups) {
  require(groups > 0 && x.size(1) % groups == 0, "group is ", groups, "; it must divide input's ",
      x.size(1), " channels");
  for (const auto& [name, w] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}})
    if (*w) shape(name, **w, {x.size(1)});
}

}  // namespace

// torch_npu's documentation of torch.nn.functional.group_norm: at least two dimensions, eps above
// 0. A3 refuses group_norm's samples in PyTorch's tests, of which one has eps -0.5 (Ascend/pytorch,
// ci-test, disabled_testcases.json: aclnnGroupNorm).
SHAPED(aclnnGroupNorm,
    (Tensor input, Opt<Tensor> weight, Opt<Tensor> bias, int64_t n, int64_t c, int64_t area,
        int64_t groups, double epsilon, Tensor out, Tensor mean, Tensor rstd),
    (rank("input", input, 2, 8), require(epsilon > 0, "eps is ", epsilon, "; it must be above 0"),
        SAME(out, input)),
    {
      const auto [y, m, r] = at::native_group_norm(
          upcast(input).contiguous(), upcast(weight), upcast(bias), n, c, area, groups, epsilon);
      out.copy_(y);
      mean.copy_(m);
      rstd.copy_(r);
    })
OP(aclnnGroupNormBackward,
    (Tensor grad, Tensor input, Tensor mean, Tensor rstd, Opt<Tensor> weight, int64_t n, int64_t c,
        int64_t area, int64_t groups, Bools mask, Opt<Tensor> grad_input, Opt<Tensor> grad_weight,
        Opt<Tensor> grad_bias),
    {
      const auto [x, w, b] = at::native_group_norm_backward(upcast(grad).contiguous(),
          upcast(input).contiguous(), upcast(mean), upcast(rstd), upcast(weight), n, c, area,
          groups, {mask[0], mask[1], mask[2]});
      copy_if_given(grad_input, x);
      copy_if_given(grad_weight, w);
      copy_if_given(grad_bias, b);
    })
CHECKED(aclnnGroupNormSilu,
    (Tensor x, Opt<Tensor> weight, Opt<Tensor> bias, int64_t groups, double epsilon, Tensor out,
        Tensor mean, Tensor rstd),
    {
      check_groups(x, weight, bias, groups);
      COMPUTE {
        const auto normed = group(x, weight, bias, groups, epsilon);
        out.copy_(at::silu(normed.y));
        mean.copy_(normed.mean);
        rstd.copy_(normed.rstd);
      };
    })
CHECKED(aclnnGroupNormSwish,
    (Tensor x, Tensor weight, Tensor bias, int64_t groups, Text, double epsilon, bool activates,
        double swish, Tensor out, Tensor mean, Tensor rstd),
    {
      check_groups(x, weight, bias, groups);
      COMPUTE {
        const auto normed = group(x, weight, bias, groups, epsilon);
        out.copy_(activates ? normed.y * at::sigmoid(normed.y * swish) : normed.y);
        mean.copy_(normed.mean);
        rstd.copy_(normed.rstd);
      };
    })
CHECKED(aclnnGroupNormSwishGrad,
    (Tensor grad, Tensor mean, Tensor rstd, Tensor x, Tensor weight, Tensor bias, int64_t groups,
        Text, double swish, bool wants_weight, bool wants_bias, Tensor x_grad, Tensor weight_grad,
        Tensor bias_grad),
    {
      check_groups(x, weight, bias, groups);
      COMPUTE {
        const Ints grouped{x.size(0), groups, -1};
        Ints by_channel(x.dim(), 1);
        by_channel[1] = x.size(1);
        const auto inverse = rstd.to(at::kFloat).view({x.size(0), groups, 1});
        const auto normed =
            (x.to(at::kFloat).reshape(grouped) - mean.to(at::kFloat).view({x.size(0), groups, 1})) *
            inverse;
        const auto w = weight.to(at::kFloat).view(by_channel),
                   y = normed.reshape(x.sizes()) * w + bias.to(at::kFloat).view(by_channel);
        const auto gate = at::sigmoid(y * swish),
                   g = grad.to(at::kFloat) * (gate + y * swish * gate * (1 - gate));
        const auto scaled = (g * w).reshape(grouped);
        x_grad.copy_(
            (inverse * (scaled - scaled.mean(-1, true) - normed * (scaled * normed).mean(-1, true)))
                .reshape(x.sizes()));
        if (wants_weight)
          weight_grad.copy_(at::sum_to(g * normed.reshape(x.sizes()), by_channel).view(-1));
        if (wants_bias) bias_grad.copy_(at::sum_to(g, by_channel).view(-1));
      };
    })
