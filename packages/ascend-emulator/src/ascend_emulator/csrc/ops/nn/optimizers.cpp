#include "operator/op.h"

// torch.optim.AdamW(fused=True). The step counts from 0: op-plugin subtracts one from PyTorch's step.
CHECKED(aclnnApplyAdamWV2,
    (Tensor weight, Tensor first, Tensor second, Opt<Tensor> largest, Tensor gradient, Tensor step, float rate, float beta1,
        float beta2, float decay, float epsilon, bool amsgrad, bool maximize),
    {
      one_of("var", weight, kFloating);
      for (const auto& [name, x] : {std::pair{"m", &first}, std::pair{"v", &second}, std::pair{"grad", &gradient}})
        shape(name, *x, weight.sizes());
      check(!amsgrad || largest, kOpParam, "amsgrad needs max_grad_norm");
      check(step.numel() == 1, kOpParam, "step has ", step.numel(), " elements; it must have 1");
      COMPUTE {
        const double steps = step.item<double>() + 1;
        const auto slope = maximize ? -gradient.to(at::kFloat) : gradient.to(at::kFloat);
        first.copy_(first.to(at::kFloat) * beta1 + slope * (1 - beta1));
        second.copy_(second.to(at::kFloat) * beta2 + slope.square() * (1 - beta2));
        auto size = second.to(at::kFloat);
        if (amsgrad) {
          largest->copy_(at::maximum(largest->to(at::kFloat), size));
          size = largest->to(at::kFloat);
        }
        const auto scale = (size / (1 - std::pow(beta2, steps))).sqrt() + epsilon;
        weight.copy_(
            weight.to(at::kFloat) * (1 - rate * decay) - first.to(at::kFloat) / scale * (rate / (1 - std::pow(beta1, steps))));
      };
    })
