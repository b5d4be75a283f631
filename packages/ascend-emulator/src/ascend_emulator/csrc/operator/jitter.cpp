// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "jitter.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <unordered_map>

#include "core/hash.h"
#include "core/jitter.h"
#include "core/registry.h"
#include "core/status.h"

namespace emu::jitter {
namespace {

// Output parameters, and operators without "aclnn". Not listed: operators that write a part of a
// tensor, whose other elements would move again with each call.
struct Row {
  const char *outputs, *operators;
};
constexpr Row kRows[] = {
    // Functions that implementations approximate.
    {"self",
        "InplaceAcos InplaceAcosh InplaceAsin InplaceAsinh InplaceAtan InplaceAtanh InplaceCos "
        "InplaceCosh InplaceErf InplaceErfc InplaceErfinv InplaceExp InplaceExp2 InplaceExpm1 "
        "InplaceLog InplaceLog10 InplaceLog1p InplaceLog2 InplaceReciprocal InplaceRsqrt "
        "InplaceSin InplaceSinc InplaceSinh InplaceSqrt InplaceTan InplaceCelu InplaceElu "
        "InplaceMish InplaceSigmoid InplaceTanh InplacePowTensorScalar InplacePowTensorTensor "
        "InplaceXLogYScalarOther"},
    {"out",
        "Acos Acosh Asin Asinh Atan Atanh Atan2 Cos Cosh Erf Erfc Erfinv Exp Exp2 Expm1 Log Log10 "
        "Log1p Log2 Reciprocal Rsqrt Sin Sinc Sinh Sqrt Tan Celu Elu FastGelu Gelu GeluV2 Glu "
        "GeluMul Mish Sigmoid Silu Softplus SwiGlu SwiGluGrad ClippedSwiglu GeGluV3 Tanh Logit "
        "LogSigmoidForward PowTensorScalar PowTensorTensor PowScalarTensor LogAddExp LogAddExp2 "
        "XLogYTensor XLogYScalarOther XLogYScalarSelf ForeachAcos ForeachAsin ForeachAtan "
        "ForeachCos ForeachCosh ForeachErf ForeachErfc ForeachExp ForeachExpm1 ForeachLog "
        "ForeachLog10 ForeachLog1p ForeachLog2 ForeachReciprocal ForeachSigmoid ForeachSin "
        "ForeachSinh ForeachSqrt ForeachTan ForeachTanh EluBackward FastGeluBackward GeluBackward "
        "GeluBackwardV2 GluBackward MishBackward SigmoidBackward SiluBackward TanhBackward "
        "LogSigmoidBackward LogitGrad SoftplusBackward"},
    // Sums, whose order is an implementation's.
    {"out",
        "Addbmm Addmm AddmmWeightNz Addmv Addr Baddbmm BatchMatMul BatchMatMulWeightNz Dot Matmul "
        "MatmulWeightNz Mm Mv TransposeBatchMatMul TransposeBatchMatMulWeightNz QuantMatmulV5 "
        "QuantMatmulWeightNz WeightQuantBatchMatmulNz WeightQuantBatchMatmulV2 "
        "WeightQuantBatchMatmulV3 GroupedMatmul GroupedMatmulV4 GroupedMatmulV5 "
        "GroupedMatmulWeightNz GroupedMatmulFinalizeRoutingV2 GroupedMatmulFinalizeRoutingV3 "
        "GroupedMatmulFinalizeRoutingWeightNz GroupedMatmulFinalizeRoutingWeightNzV2 "
        "AlltoAllMatmul AlltoAllMatmulV2 MatmulAlltoAll MatmulAlltoAllV2 AllGatherMatmul "
        "AllGatherMatmulV2 MatmulAllReduce MatmulAllReduceV2 MatmulAllReduceV3 "
        "MatmulReduceScatter MatmulReduceScatterV2 QuantMatmulAllReduce QuantMatmulAllReduceV2 "
        "QuantMatmulAllReduceV5 WeightQuantMatmulAllReduce WeightQuantMatmulAllReduceV2 "
        "Convolution ConvDepthwise2d ConvTbc Cdist Pdist LinalgCross ReduceSum ReduceNansum Mean "
        "Prod ProdDim Trace Cumsum Cumprod VarCorrection Std Norm LinalgVectorNorm LogSumExp "
        "ForeachNorm Softmax LogSoftmax ScaledMaskedSoftmax MaskedSoftmaxWithRelPosBias "
        "SoftmaxBackward LogSoftmaxBackward ScaledMaskedSoftmaxBackward LayerNorm FastLayerNorm "
        "GroupNorm GroupNormSilu GroupNormSwish BatchNorm BatchNormElemt AttentionUpdate "
        "AvgPool2d AvgPool3d AdaptiveAvgPool2d AdaptiveAvgPool3d UpsampleLinear1d "
        "UpsampleTrilinear3d AffineGrid GridSampler2D GridSampler3D BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits KlDiv L1Loss MseLoss SmoothL1Loss SoftMarginLoss CtcLoss "
        "IncreFlashAttentionV4 PromptFlashAttentionV3 FusedInferAttentionScoreV2 "
        "FusedInferAttentionScoreV3 FusedInferAttentionScoreV4 FusedInferAttentionScoreV5 "
        "FlashAttentionScore FlashAttentionScoreV2 FlashAttentionScoreV3 FlashAttentionScoreV4 "
        "FlashAttentionVarLenScore "
        "FlashAttentionVarLenScoreV2 FlashAttentionVarLenScoreV3 FlashAttentionVarLenScoreV4 "
        "FlashAttentionVarLenScoreV5 SparseFlashAttention SparseFlashAttentionV2 "
        "KvQuantSparseFlashAttention "
        "ChunkGatedDeltaRule RecurrentGatedDeltaRule MoeFinalizeRouting MoeFinalizeRoutingV2 "
        "MoeFinalizeRoutingV4 MoeTokenUnpermute MoeDistributeCombine MoeDistributeCombineV2 "
        "MoeDistributeCombineV3 MoeDistributeCombineV4 InterleaveRope RotaryPositionEmbedding "
        "RotaryPositionEmbeddingV2 CrossEntropyLossGrad"},
    {"self", "InplaceAddmm InplaceAddr"},
    {"y", "MoeGatingTopK MoeGatingTopKV2 MoeGatingTopKSoftmax MoeGatingTopKSoftmaxV2"},
    {"y rstd",
        "RmsNorm AddRmsNorm AddRmsNormCast GemmaRmsNorm AddLayerNorm DeepNorm "
        "MoeDistributeCombineAddRmsNorm MoeDistributeCombineAddRmsNormV2"},
    {"var mean std", "VarMean StdMeanCorrection"},
    {"query key", "ApplyRotaryPosEmb ApplyRotaryPosEmbV2"},
    {"query_out key_out", "RopeWithSinCosCache RopeWithSinCosCacheV2"},
    {"loss", "CrossEntropyLoss"},
    {"x_grad gamma_grad", "RmsNormGrad"},
    {"grad_input grad_weight grad_bias",
        "ConvolutionBackward ConvTbcBackward LayerNormBackward GroupNormBackward "
        "BatchNormBackward"},
};

// Output parameters by operator.
const std::unordered_map<std::string, std::string>& table() {
  static const auto* rows = [] {
    auto* out = new std::unordered_map<std::string, std::string>;
    for (const auto& row : kRows) {
      std::istringstream operators(row.operators);
      for (std::string name; operators >> name;)
        (*out)["aclnn" + name] = text(" ", row.outputs, " ");
    }
    return out;
  }();
  return *rows;
}

// Zeros, infinities and NaN stay. So do small whole numbers: one and zero bound what sigmoid,
// softmax and cosine return, and sums of whole numbers are exact in any order.
template <class T> bool stays(T value) {
  const double number = static_cast<double>(value);
  return !std::isfinite(number) ||
         (number == std::trunc(number) &&
             std::abs(number) <= std::ldexp(1., std::numeric_limits<T>::digits - 2));
}

template <class T, class Bits> void move(T* values, int64_t count, uint64_t key) {
  for (int64_t i = 0; i < count; ++i) {
    if (stays(values[i])) continue;
    Bits bits;
    std::memcpy(&bits, values + i, sizeof bits);
    // The bits of a magnitude are in the order of the magnitudes.
    const uint64_t draw = hash(key, {static_cast<uint64_t>(i), bits}) % 3;
    bits = static_cast<Bits>(bits + draw - 1);
    T moved;
    std::memcpy(&moved, &bits, sizeof bits);
    const double number = static_cast<double>(moved);
    if (number != 0 && std::isfinite(number)) values[i] = moved;
  }
}

void move(const at::Tensor& result, uint64_t key) {
  if (!result.defined()) return;
  if (result.is_complex()) return move(at::view_as_real(result), key);
  const auto values = result.contiguous();
  const auto count = values.numel();
  switch (values.scalar_type()) {
    case at::kHalf: move<at::Half, uint16_t>(values.data_ptr<at::Half>(), count, key); break;
    case at::kBFloat16:
      move<at::BFloat16, uint16_t>(values.data_ptr<at::BFloat16>(), count, key);
      break;
    case at::kFloat: move<float, uint32_t>(values.data_ptr<float>(), count, key); break;
    case at::kDouble: move<double, uint64_t>(values.data_ptr<double>(), count, key); break;
    default: return;
  }
  if (!values.is_same(result)) result.copy_(values);
}

}  // namespace

void move_results(const char* name, const char* parameters, at::ArrayRef<uint16_t> ends,
    const std::vector<at::Tensor>& tensors) {
  const auto row = table().find(name);
  if (row == table().end()) return;
  uint64_t key = seed();
  for (const char* letter = name; *letter; ++letter)
    key = hash(key, {static_cast<uint64_t>(*letter)});
  size_t first = 0;
  bool any = false;
  for (size_t position = 0; position < ends.size(); ++position) {
    const auto parameter = nth(parameters, static_cast<int64_t>(position));
    const bool moves = row->second.find(text(" ", parameter, " ")) != std::string::npos;
    any |= moves;
    for (; first < ends[position]; ++first)
      if (moves) move(tensors[first], key);
  }
  check(any, kOpFailed, "none of its parameters is called", row->second);
}

}  // namespace emu::jitter
