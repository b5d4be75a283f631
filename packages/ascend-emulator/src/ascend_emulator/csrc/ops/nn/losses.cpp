// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Losses and their gradients. Reductions: 0 none, 1 mean, 2 sum (at::Reduction).
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

// Divisor of the gradient.
double count(int64_t reduction, const Tensor& self) {
  return reduction == at::Reduction::Mean ? static_cast<double>(self.numel()) : 1.0;
}
}  // namespace

OP(aclnnL1LossBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, Tensor out),
    { out.copy_(at::sign(upcast(self) - upcast(target)) * upcast(grad) / count(reduction, out)); })

OP(aclnnBinaryCrossEntropyWithLogitsBackward,
    (Tensor grad, Tensor self, Tensor target, Opt<Tensor> weight, Opt<Tensor> pos_weight,
        int64_t reduction, Tensor out),
    {
      const auto x = at::sigmoid(upcast(self));
      const auto t = upcast(target);
      auto slope = x - t;
      if (pos_weight) {
        const auto positive = upcast(*pos_weight) * t;
        slope = (positive + 1 - t) * x - positive;
      }
      if (weight) slope = slope * upcast(*weight);
      out.copy_(slope * upcast(grad) / count(reduction, self));
    })

OP(aclnnKlDivBackward,
    (Tensor grad, Tensor self, Tensor target, int64_t reduction, bool log_target, Tensor out), {
      const auto t = log_target ? at::exp(upcast(target)) : upcast(target);
      out.copy_(-at::where(t > 0, t, 0) * upcast(grad) / count(reduction, self));
    })
OP(aclnnKlDivTargetBackward,
    (Tensor grad, Tensor self, Tensor target, int64_t reduction, bool log_target, Tensor out), {
      const auto t = upcast(target);
      const auto slope = log_target ? at::exp(t) * (t + 1 - upcast(self))
                                    : at::where(t > 0, at::log(t) + 1 - upcast(self), 0);
      out.copy_(slope * upcast(grad) / count(reduction, self));
    })

OP(aclnnMultilabelMarginLoss,
    (Tensor self, Tensor target, int64_t reduction, Tensor out, Tensor is_target), {
      const auto compute = [&] {
        const auto [loss, hit] =
            at::multilabel_margin_loss_forward(upcast(self), to_int64(target), reduction);
        out.copy_(loss);
        is_target.copy_(hit);
      };
      with_index("target", target, self.size(-1), compute, -1);
    })

namespace {
// torch_npu's documentation of torch.nn.functional.ctc_loss: no target of length 0.
void not_empty(const Ints& lengths) {
  require(!lengths.empty() && *std::min_element(lengths.begin(), lengths.end()) > 0,
      "targetLengths is ", at::IntArrayRef(lengths),
      "; it must have one length above 0 per sample");
}

// ATen reads beyond the probabilities for others. What follows a sample's targets is not read.
void check_targets(const Tensor& targets, const Ints& lengths, int64_t classes) {
  for (size_t i = 0, first = 0; i < lengths.size(); first += lengths[i++]) {
    const bool packed = targets.dim() == 1;
    const auto own = packed ? targets : targets.select(0, static_cast<int64_t>(i));
    const auto start = packed ? static_cast<int64_t>(first) : 0;
    require(start + lengths[i] <= own.size(0), "targets has shape ", targets.sizes(),
        " for targetLengths ", at::IntArrayRef(lengths));
    check_indices("targets", own.narrow(0, start, lengths[i]), classes);
  }
}
}  // namespace
// log_alpha may be wider than 2 * longest target + 1, because op-plugin rounds up.
SHAPED(aclnnCtcLoss,
    (Tensor probabilities, Tensor targets, Ints inputs, Ints lengths, int64_t blank,
        bool zero_infinity, Tensor out, Tensor log_alpha),
    not_empty(lengths), {
      check_targets(targets, lengths, probabilities.size(-1));
      const auto [loss, alpha] = at::_ctc_loss(
          upcast(probabilities), to_int64(targets), inputs, lengths, blank, zero_infinity);
      out.copy_(loss);
      log_alpha.zero_().narrow(-1, 0, alpha.size(-1)).copy_(alpha);
    })
SHAPED(aclnnCtcLossBackward,
    (Tensor grad, Tensor probabilities, Tensor targets, Ints inputs, Ints lengths, Tensor loss,
        Tensor log_alpha, int64_t blank, bool zero_infinity, Tensor out),
    not_empty(lengths), {
      check_targets(targets, lengths, probabilities.size(-1));
      const int64_t width = 2 * *std::max_element(lengths.begin(), lengths.end()) + 1;
      out.copy_(
          at::_ctc_loss_backward(upcast(grad), upcast(probabilities), to_int64(targets), inputs,
              lengths, upcast(loss), upcast(log_alpha).narrow(-1, 0, width), blank, zero_infinity));
    })

// npu_cross_entropy_loss: limits of torch_npu's documentation.
namespace {
int64_t reduction_of(const Text& name) {
  one_of<Text>("reduction", name, {"mean", "sum", "none"});
  return name == "mean"  ? at::Reduction::Mean
         : name == "sum" ? at::Reduction::Sum
                         : at::Reduction::None;
}
void check_cross_entropy(const Tensor& scores, int64_t ignored, double smoothing, double zloss) {
  rule("cross_entropy_loss.numbers", [&] {
    require(ignored < scores.size(1), "ignore_index is ", ignored, "; it must be below ",
        scores.size(1), ", the classes");
    require(smoothing >= 0 && smoothing < 1, "label_smoothing is ", smoothing,
        "; allowed: from 0, below 1");
    require(zloss == 0, "lse_square_scale_for_zloss is ", zloss, "; only 0 is supported");
  });
}
}  // namespace
CHECKED(aclnnCrossEntropyLoss,
    (Tensor self, Tensor target, Opt<Tensor> weight, Text reduction, int64_t ignored,
        double smoothing, double zloss_scale, bool wants_zloss, Tensor loss,
        Tensor log_probabilities, Opt<Tensor>, Opt<Tensor>),
    {
      check_cross_entropy(self, ignored, smoothing, zloss_scale);
      const auto kind = reduction_of(reduction);
      shape("loss", loss, {kind == at::Reduction::None ? self.size(0) : 1});
      shape("log_prob", log_probabilities, self.sizes());
      COMPUTE {
        const auto scores = upcast(self);
        loss.copy_(at::cross_entropy_loss(scores, target, weight, kind, ignored, smoothing)
                .view(loss.sizes()));
        log_probabilities.copy_(at::log_softmax(scores, 1));
      };
    })
CHECKED(aclnnCrossEntropyLossGrad,
    (Tensor grad, Tensor log_probabilities, Tensor target, Opt<Tensor> weight,
        Opt<Tensor> zloss_grad, Opt<Tensor>, Text reduction, int64_t ignored, double smoothing,
        double zloss_scale, Tensor out),
    {
      check_cross_entropy(log_probabilities, ignored, smoothing, zloss_scale);
      const auto kind = reduction_of(reduction);
      require(
          !zloss_grad || zloss_grad->numel() == 0, "grad_zloss is given; only None is supported");
      rule("cross_entropy_loss_grad.defaults", [&] {
        require(smoothing == 0, "label_smoothing is ", smoothing,
            "; with a gradient only 0 is supported");
        require(kind != at::Reduction::Mean || (!weight && ignored < 0),
            "reduction is mean, and weight or ignore_index is given; with a gradient only their "
            "defaults are supported");
      });
      require(grad.numel() == (kind == at::Reduction::None ? target.numel() : 1),
          "grad_loss has shape ", grad.sizes());
      shape("out", out, log_probabilities.sizes());
      COMPUTE {
        const auto scores = upcast(log_probabilities);
        const auto slope =
            kind == at::Reduction::None ? upcast(grad).reshape({-1}) : upcast(grad).reshape({});
        const auto to_scores =
            at::nll_loss_backward(slope.to(scores.scalar_type()), scores, target, weight, kind,
                ignored, at::full({}, static_cast<double>(target.numel()), scores.options()));
        out.copy_(at::_log_softmax_backward_data(to_scores, scores, 1, scores.scalar_type()));
      };
    })
