// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators of optimizers. Inputs and outputs are the same tensors
// (op_plugin/ops/aclops/*Adam*.cpp).
#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

// The new moments, in float32 as all that follows from them.
std::pair<Tensor, Tensor> moments(
    const Tensor& m, const Tensor& v, const Tensor& grad, double beta1, double beta2) {
  return {upcast(m) * beta1 + grad * (1 - beta1), upcast(v) * beta2 + grad * grad * (1 - beta2)};
}
}  // namespace

// The formula is that of op-plugin's test_apply_adam.py.
GRAPH_OP(ApplyAdamD,
    (Tensor var, Tensor m, Tensor v, Scalar beta1_power, Scalar beta2_power, Scalar lr,
        Scalar beta1, Scalar beta2, Scalar epsilon, Tensor grad, Out var_out, Out m_out, Out v_out,
        Attributes attributes),
    {
      attributes.get("use_locking", false);  // of concurrent updates, which a stream has not
      const bool nesterov = attributes.get("use_nesterov", false);
      const auto rate =
          lr.toDouble() * std::sqrt(1 - beta2_power.toDouble()) / (1 - beta1_power.toDouble());
      COMPUTE {
        const auto gradient = upcast(grad);
        const auto [first, second] = moments(m, v, gradient, beta1.toDouble(), beta2.toDouble());
        const auto step =
            nesterov ? first * beta1.toDouble() + gradient * (1 - beta1.toDouble()) : first;
        var_out.copy_(upcast(var) - step * rate / (second.sqrt() + epsilon.toDouble()));
        m_out.copy_(first);
        v_out.copy_(second);
      };
    })

// The formula is that of op-plugin's test_apply_adam_w.py: the powers are those of the step before.
// "at present, the operator supports only false" for amsgrad (ApplyAdamWKernelNpu.cpp).
GRAPH_OP(ApplyAdamW,
    (Tensor var, Tensor m, Tensor v, Scalar beta1_power, Scalar beta2_power, Scalar lr,
        Scalar weight_decay, Scalar beta1, Scalar beta2, Scalar epsilon, Tensor grad, Opt<Tensor>,
        Out var_out, Out m_out, Out v_out, Attributes attributes),
    {
      attributes.only("amsgrad", false);
      const bool maximize = attributes.get("maximize", false);
      COMPUTE {
        const auto gradient = maximize ? upcast(grad).neg() : upcast(grad);
        const auto [first, second] = moments(m, v, gradient, beta1.toDouble(), beta2.toDouble());
        const auto correction1 = 1 - beta1_power.toDouble() * beta1.toDouble();
        const auto correction2 = 1 - beta2_power.toDouble() * beta2.toDouble();
        const auto root = (second / correction2).sqrt() + epsilon.toDouble();
        const auto decayed = upcast(var) * (1 - lr.toDouble() * weight_decay.toDouble());
        var_out.copy_(decayed - first * (lr.toDouble() / correction1) / root);
        m_out.copy_(first);
        v_out.copy_(second);
      };
    })

// BERT's Adam, without correction of the moments (torch_npu/optim/npu_fused_bert_adam.py). How it
// clips gradients and what mbart_adam does with step_size are not documented.
GRAPH_OP(ApplyAdamV2,
    (Tensor var, Tensor m, Tensor v, Scalar lr, Scalar beta1, Scalar beta2, Scalar epsilon,
        Tensor grad, Scalar max_grad_norm, Scalar, Scalar weight_decay, Opt<Scalar> step_size,
        Out var_out, Out m_out, Out v_out, Attributes attributes),
    {
      attributes.only("adam_mode", Text("adam"));
      require(!step_size, "step_size is given; computed: without it");
      require(max_grad_norm.toDouble() <= 0, "max_grad_norm is ", max_grad_norm.toDouble(),
          "; computed: none, which is -1. Clip the gradients before the call");
      COMPUTE {
        const auto [first, second] =
            moments(m, v, upcast(grad), beta1.toDouble(), beta2.toDouble());
        const auto update =
            first / (second.sqrt() + epsilon.toDouble()) + upcast(var) * weight_decay.toDouble();
        var_out.copy_(upcast(var) - update * lr.toDouble());
        m_out.copy_(first);
        v_out.copy_(second);
      };
    })
