// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Batch normalization, and the steps of synchronized batch normalization (torch.nn.SyncBatchNorm).
// Channels are dimension 1. The formulas are those of PyTorch's batch_norm_* functions.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

Ints all_but_channels(const Tensor& input) {
  Ints dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    if (dim != 1) dims.push_back(dim);
  return dims;
}

// Reshapes a vector of channels to the input's dimensions.
Tensor per_channel(const Tensor& vector, const Tensor& input) {
  Ints shape(input.dim(), 1);
  shape[1] = vector.numel();
  return upcast(vector).view(shape);
}
Tensor per_channel(const Opt<Tensor>& vector, const Tensor& input, double absent) {
  return vector ? per_channel(*vector, input) : at::scalar_tensor(absent);
}

void update(const Opt<Tensor>& running, const Tensor& value, double momentum) {
  if (running) running->copy_(upcast(*running) * (1 - momentum) + value * momentum);
}
}  // namespace

SHAPED(aclnnBatchNorm,
    (Tensor input, Opt<Tensor> weight, Opt<Tensor> bias, Opt<Tensor> running_mean,
        Opt<Tensor> running_var, bool training, double momentum, double epsilon, Tensor out,
        Tensor save_mean, Tensor save_invstd),
    require(training || (running_mean && running_var),
        "runningMean and runningVar are null; without training both are needed"),
    {
      auto mean = upcast(running_mean), var = upcast(running_var);
      const auto [y, m, r] = at::native_batch_norm(
          upcast(input), upcast(weight), upcast(bias), mean, var, training, momentum, epsilon);
      out.copy_(y);
      if (training) {
        copy_if_given(running_mean, mean.value_or(Tensor()));
        copy_if_given(running_var, var.value_or(Tensor()));
        save_mean.copy_(m);
        save_invstd.copy_(r);
      } else {
        save_mean.copy_(*mean);
        save_invstd.copy_(at::rsqrt(*var + epsilon));
      }
    })
OP(aclnnBatchNormBackward,
    (Tensor grad, Tensor input, Opt<Tensor> weight, Opt<Tensor> running_mean,
        Opt<Tensor> running_var, Opt<Tensor> save_mean, Opt<Tensor> save_invstd, bool training,
        double epsilon, Bools mask, Opt<Tensor> grad_input, Opt<Tensor> grad_weight,
        Opt<Tensor> grad_bias),
    {
      const auto [x, w, b] = at::native_batch_norm_backward(upcast(grad), upcast(input),
          upcast(weight), upcast(running_mean), upcast(running_var), upcast(save_mean),
          upcast(save_invstd), training, epsilon, {mask[0], mask[1], mask[2]});
      copy_if_given(grad_input, x);
      copy_if_given(grad_weight, w);
      copy_if_given(grad_bias, b);
    })
OP(aclnnBatchNormStats, (Tensor input, double epsilon, Tensor mean, Tensor invstd), {
  const auto [v, m] =
      at::var_mean(upcast(input), at::OptionalIntArrayRef(all_but_channels(input)), Scalar(0));
  mean.copy_(m);
  invstd.copy_(at::rsqrt(v + epsilon));
})
OP(aclnnBatchNormElemt,
    (Tensor input, Opt<Tensor> weight, Opt<Tensor> bias, Tensor mean, Tensor invstd, double,
        Tensor out),
    {
      const auto normal = (upcast(input) - per_channel(mean, input)) * per_channel(invstd, input);
      out.copy_(normal * per_channel(weight, input, 1) + per_channel(bias, input, 0));
    })
OP(aclnnBatchNormElemtBackward,
    (Tensor grad, Tensor input, Tensor mean, Tensor invstd, Opt<Tensor> weight, Tensor sum_dy,
        Tensor sum_dy_xmu, Tensor counts, Tensor out),
    {
      const auto total = counts.sum().item<double>();
      const auto scale = per_channel(invstd, input);
      const auto towards_mean = (upcast(input) - per_channel(mean, input)) * scale * scale *
                                per_channel(sum_dy_xmu, input) / total;
      out.copy_((upcast(grad) - per_channel(sum_dy, input) / total - towards_mean) * scale *
                per_channel(weight, input, 1));
    })
OP(aclnnBatchNormReduceBackward,
    (Tensor grad, Tensor input, Tensor mean, Tensor invstd, Opt<Tensor>, bool, bool, bool,
        Opt<Tensor> sum_dy, Opt<Tensor> sum_dy_xmu, Opt<Tensor> grad_weight, Opt<Tensor> grad_bias),
    {
      const auto dims = all_but_channels(input);
      const auto sum = upcast(grad).sum(dims);
      const auto weighted = (upcast(grad) * (upcast(input) - per_channel(mean, input))).sum(dims);
      copy_if_given(sum_dy, sum);
      copy_if_given(sum_dy_xmu, weighted);
      copy_if_given(grad_weight, weighted * upcast(invstd));
      copy_if_given(grad_bias, sum);
    })
OP(aclnnBatchNormReduce, (Tensor input, Tensor sum, Tensor square_sum), {
  const auto dims = all_but_channels(input);
  sum.copy_(upcast(input).sum(dims));
  square_sum.copy_(upcast(input).square().sum(dims));
})
// One row of means and inverse standard deviations per process, and their counts.
OP(aclnnBatchNormGatherStatsWithCounts,
    (Tensor, Tensor means, Tensor invstds, Opt<Tensor> running_mean, Opt<Tensor> running_var,
        double momentum, double epsilon, Tensor counts, Tensor mean, Tensor invstd),
    {
      const auto n = counts.to(at::kDouble).view({-1, 1});
      const auto total = n.sum();
      const auto m = means.to(at::kDouble);
      const auto overall = (m * n).sum(0) / total;
      const auto squares =
          ((invstds.to(at::kDouble).pow(-2) - epsilon + (m - overall).square()) * n).sum(0);
      mean.copy_(overall);
      invstd.copy_(at::rsqrt(squares / total + epsilon));
      update(running_mean, overall, momentum);
      update(running_var, squares / (total - 1), momentum);
    })
OP(aclnnSyncBatchNormGatherStats,
    (Tensor sums, Tensor square_sums, Tensor counts, Tensor running_mean, Tensor running_var,
        float momentum, float epsilon, Tensor mean, Tensor invstd),
    {
      const auto total = counts.to(at::kDouble).sum();
      const auto channels = mean.numel();
      const auto overall = sums.to(at::kDouble).view({-1, channels}).sum(0) / total;
      const auto variance =
          square_sums.to(at::kDouble).view({-1, channels}).sum(0) / total - overall.square();
      mean.copy_(overall);
      invstd.copy_(at::rsqrt(variance + epsilon));
      update(running_mean, overall, momentum);
      update(running_var, variance * total / (total - 1), momentum);
    })
