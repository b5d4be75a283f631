// Legacy graph operators of networks: activations, matrix products, dropout, losses.
#include <ATen/CPUGeneratorImpl.h>

#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

Tensor matrix(const Tensor& x, bool transposed) { return transposed ? upcast(x).transpose(-1, -2) : upcast(x); }

Computation matrix_product(const Tensor& x1, const Tensor& x2, const Opt<Tensor>& bias, const Tensor& y, bool first, bool second) {
  one_of("x1", x1, kFloating);
  same_dtype("x2", x2, "x1", x1);
  check(x1.dim() >= 2 && x2.dim() >= 2, kOpParam, "x1 has shape ", x1.sizes(), " and x2 ", x2.sizes(), "; allowed: matrices");
  const auto left = first ? x1.transpose(-1, -2) : x1;
  const auto right = second ? x2.transpose(-1, -2) : x2;
  SHAPE(y, PRODUCT(left, right, 2, 8));
  COMPUTE {
    const auto value = at::matmul(matrix(x1, first), matrix(x2, second));
    y.copy_(bias ? value + upcast(*bias) : value);
  };
}

void kept_of(const Tensor& mask, const Tensor& x) {
  one_of("mask", mask, {at::kByte});
  check(mask.numel() >= x.numel(), kOpParam, "mask has ", mask.numel(), " values for ", x.numel());
}
Tensor dropped(const Tensor& x, const Tensor& mask, double keep) {
  return at::where(mask.reshape(-1).narrow(0, 0, x.numel()).view(x.sizes()).ne(0), x / keep, 0);
}

// The one dimension of a softmax.
int64_t only_dim(const Ints& dims, int64_t rank) {
  check(dims.size() == 1, kOpParam, "axis is ", at::IntArrayRef(dims), "; computed: one dimension");
  return real_dim(dims[0], rank, "axis");
}

Tensor power_of(const Tensor& value, double exponent) { return at::where(value.eq(0), 0, at::pow(value, exponent)); }
}  // namespace

GRAPH_OP(Swish, (Tensor x, Out y, Attributes attributes), {
  const auto scale = attributes.get("scale", 1.0f);
  one_of("x", x, kFloating);
  SAME(y, x);
  COMPUTE {
    const auto value = upcast(x);
    y.copy_(value * at::sigmoid(value * scale));
  };
})
// The forward's output, y, is not needed.
GRAPH_OP(SwishGrad, (Tensor grad, Tensor x, Tensor, Out dx, Attributes attributes), {
  attributes.only("scale", 1.0f);
  SAME(grad, x);
  SAME(dx, x);
  COMPUTE { dx.copy_(at::silu_backward(upcast(grad), upcast(x))); };
})

GRAPH_OP(Mish, (Tensor x, Out y), {
  one_of("x", x, kFloating);
  SAME(y, x);
  COMPUTE { y.copy_(at::mish(upcast(x))); };
})
GRAPH_OP(MishGrad, (Tensor grad, Tensor x, Out dx), {
  SAME(grad, x);
  SAME(dx, x);
  COMPUTE { dx.copy_(at::mish_backward(upcast(grad), upcast(x))); };
})

GRAPH_OP(MatMul, (Tensor x1, Tensor x2, Opt<Tensor> bias, Out y, Attributes attributes),
    { return matrix_product(x1, x2, bias, y, attributes.get("transpose_x1", false), attributes.get("transpose_x2", false)); })
GRAPH_OP(BatchMatMul, (Tensor x1, Tensor x2, Out y, Attributes attributes),
    { return matrix_product(x1, x2, std::nullopt, y, attributes.get("adj_x1", false), attributes.get("adj_x2", false)); })

// A byte for each value, 1 where it is kept; what rounds the mask up stays 0. The seed alone decides: two calls with the same one
// draw the same mask (DropoutWithByteMaskKernelNpu.cpp).
GRAPH_OP(DropOutGenMaskV3, (Ints sizes, Scalar keep, Out mask, Attributes attributes), {
  const auto seed = attributes.get("seed", int64_t{0});
  const auto second = attributes.get("seed2", int64_t{0});
  const auto probability = keep.toDouble();
  within("prob", probability, 0.0, 1.0);
  one_of("mask", mask, {at::kByte});
  const auto values = c10::multiply_integers(sizes);
  check(mask.numel() >= values, kOpParam, "mask has ", mask.numel(), " values for ", values);
  COMPUTE {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed + (second << 32)));
    mask.zero_();
    mask.view(-1).narrow(0, 0, values).bernoulli_(probability, generator);
  };
})
GRAPH_OP(DropOutDoMaskV3, (Tensor x, Tensor mask, Scalar keep, Out y), {
  const auto probability = keep.toDouble();
  one_of("x", x, kFloating);
  kept_of(mask, x);
  SAME(y, x);
  COMPUTE { y.copy_(dropped(upcast(x), mask, probability)); };
})

GRAPH_OP(AxpyWithSoftmaxAndDropOutDoMask, (Tensor x1, Tensor x2, Tensor mask, Out softmax, Out y, Attributes attributes), {
  const auto alpha = attributes.get("alpha", 1.0f);
  const auto keep = attributes.get("input_keep_prob", 1.0f);
  const auto dim = only_dim(attributes.get("axis", Ints{-1}), x1.dim());
  one_of("x1", x1, kFloating);
  SAME(x2, x1);
  SAME(softmax, x1);
  SAME(y, x1);
  kept_of(mask, x1);
  COMPUTE {
    const auto value = at::softmax(upcast(x1) + upcast(x2) * alpha, dim);
    softmax.copy_(value);
    y.copy_(dropped(value, mask, keep));
  };
})
// Of x2, which was multiplied by alpha.
GRAPH_OP(DropoutWithMulsAndSoftmaxGrad, (Tensor grad, Tensor mask, Tensor softmax, Out dx, Attributes attributes), {
  const auto alpha = attributes.get("alpha", 1.0f);
  const auto keep = attributes.get("input_keep_prob", 1.0f);
  const auto dim = only_dim(attributes.get("axes", Ints{-1}), softmax.dim());
  SAME(grad, softmax);
  SAME(dx, softmax);
  kept_of(mask, grad);
  COMPUTE {
    const auto value = upcast(softmax);
    const auto inner = dropped(upcast(grad), mask, keep) * value;
    dx.copy_((inner - value * inner.sum(dim, true)) * alpha);
  };
})

// TensorFlow's: the gradient is that of labels whose sum is 1.
GRAPH_OP(SoftmaxCrossEntropyWithLogits, (Tensor features, Tensor labels, Out loss, Out backprop), {
  rank("features", features, 2);
  SAME(labels, features);
  SAME(backprop, features);
  SHAPE(loss, {features.size(0)});
  COMPUTE {
    const auto logs = at::log_softmax(upcast(features), -1);
    loss.copy_((upcast(labels) * logs).sum(-1).neg());
    backprop.copy_(logs.exp() - upcast(labels));
  };
})

GRAPH_OP(LayerNormV3, (Tensor x, Tensor gamma, Tensor beta, Out y, Out mean, Out rstd, Attributes attributes), {
  const auto begin = real_dim(attributes.get("begin_norm_axis", int64_t{0}), x.dim(), "begin_norm_axis");
  const auto epsilon = attributes.get("epsilon", 1e-5f);
  attributes.only("begin_params_axis", begin);
  const auto normalized = x.sizes().slice(begin);
  one_of("x", x, kFloating);
  SHAPE(gamma, normalized);
  SHAPE(beta, normalized);
  SAME(y, x);
  COMPUTE {
    const auto [value, center, scale] = at::native_layer_norm(upcast(x), normalized, upcast(gamma), upcast(beta), epsilon);
    y.copy_(value);
    mean.copy_(center.view(mean.sizes()));
    rstd.copy_(scale.view(rstd.sizes()));
  };
})

// All inputs have the shape [..., P, R, M] of the differences; dx is their sum over R. Maximum norm: p = -1
// (CdistBackwardKernelNpu.cpp). Where the distance is 0, so is the gradient.
GRAPH_OP(CdistGrad, (Tensor grad, Tensor x1, Tensor x2, Tensor distance, Out dx, Attributes attributes), {
  const double p = attributes.get("p", 2.0f);
  one_of("x1", x1, kFloating);
  SAME(grad, x1);
  SAME(x2, x1);
  SAME(distance, x1);
  Ints expected = x1.sizes().vec();
  check(expected.size() >= 3, kOpParam, "x1 has shape ", x1.sizes(), "; allowed: 3 dimensions or more");
  expected.erase(expected.end() - 2);
  SHAPE(dx, expected);
  COMPUTE {
    const auto difference = upcast(x1) - upcast(x2);
    const auto length = upcast(distance);
    const auto size = difference.abs();
    Tensor each = upcast(grad) * difference.sign();
    if (p == 0)
      each = at::zeros_like(each);
    else if (p < 0)
      each = each * size.ge(length);
    else if (p != 1)
      each = each * power_of(size, p - 1) * power_of(length, 1 - p);
    dx.copy_(at::where(length.eq(0), 0, each).sum(-2));
  };
})
