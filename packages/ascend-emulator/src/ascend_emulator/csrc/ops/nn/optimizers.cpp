// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "operator/op.h"

namespace {
using namespace emu;

void check_numbers(std::initializer_list<std::pair<const char*, Tensor>> numbers) {
  for (const auto& [name, x] : numbers)
    require(x.numel() == 1, name, " has ", x.numel(), " elements; it must have 1");
}

// Moves both moments towards the gradient; returns the gradient that was used.
Tensor update_moments(const Tensor& first, const Tensor& second, const Tensor& gradient,
    double beta1, double beta2, bool maximize) {
  const auto slope = maximize ? -gradient.to(at::kFloat) : gradient.to(at::kFloat);
  first.copy_(first.to(at::kFloat) * beta1 + slope * (1 - beta1));
  second.copy_(second.to(at::kFloat) * beta2 + slope.square() * (1 - beta2));
  return slope;
}

// The step of AdamW. Powers of beta1 and beta2 are those after the step.
void adamw(const Tensor& weight, const Tensor& first, const Tensor& size, double power1,
    double power2, double rate, double decay, double epsilon) {
  const auto scale = (size / (1 - power2)).sqrt() + epsilon;
  weight.copy_(weight.to(at::kFloat) * (1 - rate * decay) -
               first.to(at::kFloat) / scale * (rate / (1 - power1)));
}

}  // namespace

// torch.optim.AdamW(fused=True). The step counts from 0: op-plugin subtracts one from PyTorch's
// step.
CHECKED(aclnnApplyAdamWV2,
    (Tensor weight, Tensor first, Tensor second, Opt<Tensor> largest, Tensor gradient, Tensor step,
        float rate, float beta1, float beta2, float decay, float epsilon, bool amsgrad,
        bool maximize),
    {
      require(!amsgrad || largest, "amsgrad needs max_grad_norm");
      check_numbers({{"step", step}});
      COMPUTE {
        const double steps = step.item<double>() + 1;
        update_moments(first, second, gradient, beta1, beta2, maximize);
        auto size = second.to(at::kFloat);
        if (amsgrad) {
          largest->copy_(at::maximum(largest->to(at::kFloat), size));
          size = largest->to(at::kFloat);
        }
        adamw(weight, first, size, std::pow(beta1, steps), std::pow(beta2, steps), rate, decay,
            epsilon);
      };
    })
// The powers are those before the step (op-plugin's test_npu_apply_adam_w.py).
CHECKED(aclnnApplyAdamW,
    (Tensor weight, Tensor first, Tensor second, Tensor power1, Tensor power2, Tensor rate,
        Tensor decay, Tensor beta1, Tensor beta2, Tensor epsilon, Tensor gradient, Opt<Tensor>,
        bool amsgrad, bool maximize),
    {
      check_numbers({{"beta1_power", power1}, {"beta2_power", power2}, {"lr", rate},
          {"weight_decay", decay}, {"beta1", beta1}, {"beta2", beta2}, {"epsilon", epsilon}});
      require(!amsgrad,
          "amsgrad is true; only false is emulated: whether max_grad_norm is written is not "
          "documented");
      COMPUTE {
        const double b1 = beta1.item<double>(), b2 = beta2.item<double>();
        update_moments(first, second, gradient, b1, b2, maximize);
        adamw(weight, first, second.to(at::kFloat), power1.item<double>() * b1,
            power2.item<double>() * b2, rate.item<double>(), decay.item<double>(),
            epsilon.item<double>());
      };
    })
// Adam with its epsilon beside the root of the second moment without bias correction (op-plugin's
// test_apply_adam.py).
CHECKED(aclnnApplyAdam,
    (Tensor weight, Tensor first, Tensor second, Tensor power1, Tensor power2, Tensor rate,
        Tensor beta1, Tensor beta2, Tensor epsilon, Tensor gradient, bool, bool nesterov),
    {
      check_numbers({{"beta1_power", power1}, {"beta2_power", power2}, {"lr", rate},
          {"beta1", beta1}, {"beta2", beta2}, {"epsilon", epsilon}});
      COMPUTE {
        const double b1 = beta1.item<double>();
        const auto slope = update_moments(first, second, gradient, b1, beta2.item<double>(), false);
        const double step = rate.item<double>() * std::sqrt(1 - power2.item<double>()) /
                            (1 - power1.item<double>());
        auto direction = first.to(at::kFloat);
        if (nesterov) direction = direction * b1 + slope * (1 - b1);
        weight.copy_(weight.to(at::kFloat) -
                     direction * step / (second.to(at::kFloat).sqrt() + epsilon.item<double>()));
      };
    })

// torch.optim.SGD(fused=True).
CHECKED(aclnnFusedSgd,
    (Tensors weights, Tensors gradients, Tensors momenta, Opt<Tensor> gradient_scale, float decay,
        float momentum, float rate, float dampening, bool nesterov, bool maximize,
        bool is_first_step),
    {
      require(momentum > 0, "momentum is ", momentum, "; it must be positive");
      require(gradients.size() == weights.size() && momenta.size() == weights.size(), "params has ",
          weights.size(), " tensors, grads ", gradients.size(), " and momentum_buffer_list ",
          momenta.size());
      for (size_t i = 0; i < weights.size(); ++i) {
        shape("grads", gradients[i], weights[i].sizes());
        shape("momentum_buffer_list", momenta[i], weights[i].sizes());
      }
      if (gradient_scale) check_numbers({{"grad_scale", *gradient_scale}});
      COMPUTE {
        for (size_t i = 0; i < weights.size(); ++i) {
          auto slope = gradients[i].to(at::kFloat);
          if (gradient_scale) {
            slope = slope / gradient_scale->to(at::kFloat);
            gradients[i].copy_(slope);
          }
          if (maximize) slope = -slope;
          const auto weight = weights[i].to(at::kFloat);
          slope = slope + weight * decay;
          const auto moved = is_first_step
                                 ? slope
                                 : momenta[i].to(at::kFloat) * momentum + slope * (1 - dampening);
          momenta[i].copy_(moved);
          weights[i].copy_(weight - (nesterov ? slope + moved * momentum : moved) * rate);
        }
      };
    })
