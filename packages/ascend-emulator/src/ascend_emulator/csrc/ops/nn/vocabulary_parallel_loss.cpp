// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Cross entropy of logits whose vocabulary is split over ranks, with the matmul that computes them.
// Formulas and limits: torch_npu's documentation of npu_fused_linear_online_max_sum,
// npu_fused_cross_entropy_loss_with_max_sum and
// npu_fused_linear_cross_entropy_loss_with_max_sum_backward. The order of the mask's bits, the
// first row the highest, is how its formula reads; it was not seen on hardware.
#include "ops/upcast.h"

namespace {
using namespace emu;

constexpr int64_t kVocabularyLeast = 128;

void check_weight(const Tensor& input, const Tensor& weight) {
  shape("weight", weight, {weight.size(0), input.size(1)});
}
void check_smoothing(double smoothing) {
  require(smoothing == 0, "label_smoothing is ", smoothing, "; only 0 is supported");
}

Tensor bit_places() { return at::arange(7, -1, -1, at::kInt); }
// Eight rows in a byte; those past the end count as masked.
Tensor packed(const Tensor& mask) {
  const auto bits = at::constant_pad_nd(mask.to(at::kInt), {0, -mask.numel() & 7}, 1).view({-1, 8});
  return at::bitwise_left_shift(bits, bit_places()).sum(1).to(at::kByte);
}
Tensor unpacked(const Tensor& bytes, int64_t rows) {
  return at::bitwise_right_shift(bytes.to(at::kInt).unsqueeze(1), bit_places())
      .bitwise_and(1)
      .flatten()
      .narrow(0, 0, rows);
}

Tensor logits_of(const Tensor& input, const Tensor& weight) {
  return at::matmul(upcast(input), upcast(weight).t());
}
Tensor probabilities(const Tensor& logits, const Tensor& most, const Tensor& sum) {
  return (logits - most.unsqueeze(1)).exp() / sum.unsqueeze(1);
}
}  // namespace

CHECKED(aclnnFusedLinearOnlineMaxSum,
    (Tensor input, Tensor weight, Tensor target, int64_t first, int64_t last, Tensor most,
        Tensor sum, Tensor predicted, Tensor mask, Tensor masked_target, Opt<Tensor> logits),
    {
      check_weight(input, weight);
      require(first >= 0 && first <= last && last < first + weight.size(0), "vocab_start_index is ",
          first, " and vocab_end_index ", last, "; allowed: from 0 on, at most ", weight.size(0),
          " tokens, the rows of weight");
      shape("target_mask", mask, {(input.size(0) + 7) / 8});
      COMPUTE {
        const auto found = logits_of(input, weight);
        const auto largest = found.amax(1);
        const auto below = found - largest.unsqueeze(1);
        const auto elsewhere = target.lt(first).logical_or(target.gt(last));
        const auto place = at::where(elsewhere, 0, target - first);
        most.copy_(largest);
        sum.copy_(below.exp().sum(1));
        predicted.copy_(
            at::where(elsewhere, 0, below.gather(1, to_int64(place).unsqueeze(1)).squeeze(1)));
        mask.copy_(packed(elsewhere));
        masked_target.copy_(place);
        copy_if_given(logits, found);
      };
    })
CHECKED(aclnnFusedCrossEntropyLossWithMaxSum,
    (Tensor most, Tensor sum, Tensor predicted, double smoothing, Opt<Tensor> input,
        Opt<Tensor> weight, Opt<Tensor> logits, Tensor loss, Opt<Tensor> softmax),
    {
      check_smoothing(smoothing);
      require(!input && !weight, "input or weight is given; only None is supported");
      check(!logits || softmax, kOpNull, "softmax is null");
      COMPUTE {
        loss.copy_(sum.log() - predicted);
        if (logits) softmax->copy_(probabilities(upcast(*logits), most, sum));
      };
    })
CHECKED(aclnnFusedLinearCrossEntropyLossGrad,
    (Tensor grad, Tensor input, Tensor weight, Tensor mask, Tensor masked_target, double smoothing,
        Opt<Tensor> most, Opt<Tensor> sum, Opt<Tensor> softmax, Tensor grad_input,
        Tensor grad_weight),
    {
      check_weight(input, weight);
      check_smoothing(smoothing);
      const auto rows = input.size(0);
      require(weight.size(0) >= kVocabularyLeast, "weight has ", weight.size(0), " rows; at least ",
          kVocabularyLeast);
      require(
          mask.numel() * 8 >= rows, "target_mask has ", mask.numel(), " bytes for ", rows, " rows");
      require(softmax || (most && sum),
          "softmax is null; without it logits_max and sum_exp_logits are needed");
      COMPUTE {
        auto slope =
            softmax ? softmax->clone() : probabilities(logits_of(input, weight), *most, *sum);
        const auto own = 1 - unpacked(mask, rows).to(at::kFloat);
        slope.scatter_add_(1, to_int64(masked_target).unsqueeze(1), -own.unsqueeze(1));
        slope = slope * grad.unsqueeze(1);
        grad_input.copy_(at::matmul(slope, upcast(weight)));
        grad_weight.copy_(at::matmul(slope.t(), upcast(input)));
      };
    })
