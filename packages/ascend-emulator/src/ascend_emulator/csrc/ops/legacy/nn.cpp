// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators of networks: activations, matrix products, dropout, losses.
#include <ATen/CPUGeneratorImpl.h>

#include "operator/graph_op.h"
#include "ops/cube_math.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

// ACL_ALLOW_HF32: a digit each for convolutions and matrix products (torch_npu's
// LazyInitAclops.cpp).
CubeMath cube_math(bool convolution) {
  constexpr int32_t kAllowHf32 = 14;
  const auto allowed = compile_option(kAllowHf32);
  const bool lower = allowed.size() == 2 && allowed[convolution ? 0 : 1] == '1';
  return {lower || is_chip("Ascend310P") ? CubeMath::kAllowDownPrecision : CubeMath::kKeep};
}

Computation matrix_product(const Tensor& x1, const Tensor& x2, const Opt<Tensor>& bias,
    const Tensor& y, bool first, bool second) {
  require(x1.dim() >= 2 && x2.dim() >= 2, "x1 has shape ", x1.sizes(), " and x2 ", x2.sizes(),
      "; allowed: matrices");
  const auto left = first ? x1.transpose(-1, -2) : x1;
  const auto right = second ? x2.transpose(-1, -2) : x2;
  const auto cube = cube_math(false);
  SHAPE(y, PRODUCT(left, right, 2, 8));
  COMPUTE {
    const auto value = at::matmul(upcast(cube(left)), upcast(cube(right)));
    y.copy_(bias ? value + upcast(*bias) : value);
  };
}

struct Convolution {
  Ints stride, padding, dilation;
  int64_t groups;
};
// Strides and dilations are of N, C, H and W, pads before and after H and W.
Convolution convolution(const Attributes& attributes) {
  attributes.only("data_format", Text("NCHW"));
  const auto strides = attributes.get("strides", Ints{1, 1, 1, 1});
  const auto pads = attributes.get("pads", Ints{0, 0, 0, 0});
  const auto dilations = attributes.get("dilations", Ints{1, 1, 1, 1});
  require(strides.size() == 4 && pads.size() == 4 && dilations.size() == 4, "strides is ",
      at::IntArrayRef(strides), ", pads ", at::IntArrayRef(pads), " and dilations ",
      at::IntArrayRef(dilations), "; each must have 4 values");
  require(pads[0] == pads[1] && pads[2] == pads[3], "pads is ", at::IntArrayRef(pads),
      "; computed: the same on both sides");
  return {{strides[2], strides[3]}, {pads[0], pads[2]}, {dilations[2], dilations[3]},
      attributes.get("groups", int64_t{1})};
}
// The output's shape of a convolution that is possible.
Shape convolved(const Tensor& x, const Tensor& filter, const Convolution& how) {
  rank("x", x, 4);
  rank("filter", filter, 4);
  require(how.groups > 0 && x.size(1) == filter.size(1) * how.groups &&
              filter.size(0) % how.groups == 0,
      "x has ", x.size(1), " channels for filter of shape ", filter.sizes(), " in ", how.groups,
      " groups");
  Shape out{x.size(0), filter.size(0)};
  for (int i = 0; i < 2; ++i) {
    require(how.stride[i] > 0 && how.dilation[i] > 0 && how.padding[i] >= 0, "a stride is ",
        how.stride[i], ", a dilation ", how.dilation[i], " and a pad ", how.padding[i]);
    const auto free =
        x.size(i + 2) + 2 * how.padding[i] - how.dilation[i] * (filter.size(i + 2) - 1) - 1;
    require(
        free >= 0, "filter of shape ", filter.sizes(), " is larger than x of shape ", x.sizes());
    out.push_back(free / how.stride[i] + 1);
  }
  return out;
}
// The gradient of the input (0) or of the filter (1).
Tensor slope(
    int of, const Tensor& grad, const Tensor& x, const Tensor& filter, const Convolution& how) {
  const auto both = at::convolution_backward(grad, x, filter, std::nullopt, how.stride, how.padding,
      how.dilation, false, {0, 0}, how.groups, {of == 0, of == 1, false});
  return of ? std::get<1>(both) : std::get<0>(both);
}

void kept_of(const Tensor& mask, const Tensor& x) {
  require(mask.numel() >= x.numel(), "mask has ", mask.numel(), " values for ", x.numel());
}
Tensor dropped(const Tensor& x, const Tensor& mask, double keep) {
  return at::where(mask.reshape(-1).narrow(0, 0, x.numel()).view(x.sizes()).ne(0), x / keep, 0);
}

// The one dimension of a softmax.
int64_t only_dim(const Ints& dims, int64_t rank) {
  require(dims.size() == 1, "axis is ", at::IntArrayRef(dims), "; computed: one dimension");
  return real_dim(dims[0], rank, "axis");
}

Tensor power_of(const Tensor& value, double exponent) {
  return at::where(value.eq(0), 0, at::pow(value, exponent));
}
}  // namespace

GRAPH_OP(Swish, (Tensor x, Out y, Attributes attributes), {
  const auto scale = attributes.get("scale", 1.0f);
  COMPUTE {
    const auto value = upcast(x);
    y.copy_(value * at::sigmoid(value * scale));
  };
})
// The forward's output, y, is not needed.
GRAPH_OP(SwishGrad, (Tensor grad, Tensor x, Tensor, Out dx, Attributes attributes), {
  attributes.only("scale", 1.0f);
  COMPUTE { dx.copy_(at::silu_backward(upcast(grad), upcast(x))); };
})

GRAPH_OP(Mish, (Tensor x, Out y), {
  COMPUTE { y.copy_(at::mish(upcast(x))); };
})
GRAPH_OP(MishGrad, (Tensor grad, Tensor x, Out dx), {
  COMPUTE { dx.copy_(at::mish_backward(upcast(grad), upcast(x))); };
})

GRAPH_OP(MatMul, (Tensor x1, Tensor x2, Opt<Tensor> bias, Out y, Attributes attributes), {
  return matrix_product(x1, x2, bias, y, attributes.get("transpose_x1", false),
      attributes.get("transpose_x2", false));
})
GRAPH_OP(MatMulV2, (Tensor x1, Tensor x2, Opt<Tensor> bias, Out y, Attributes attributes), {
  attributes.only("offset_x", int64_t{0});
  return matrix_product(x1, x2, bias, y, attributes.get("transpose_x1", false),
      attributes.get("transpose_x2", false));
})
GRAPH_OP(BatchMatMul, (Tensor x1, Tensor x2, Out y, Attributes attributes), {
  return matrix_product(
      x1, x2, std::nullopt, y, attributes.get("adj_x1", false), attributes.get("adj_x2", false));
})

GRAPH_OP(Conv2D, (Tensor x, Tensor filter, Opt<Tensor> bias, Out y, Attributes attributes), {
  const auto how = convolution(attributes);
  const auto cube = cube_math(true);
  if (bias) shape("bias", *bias, {filter.size(0)});
  SHAPE(y, convolved(x, filter, how));
  COMPUTE {
    y.copy_(at::conv2d(upcast(cube(x)), upcast(cube(filter)), upcast(bias), how.stride, how.padding,
        how.dilation, how.groups));
  };
})
GRAPH_OP(
    Conv2DBackpropInput, (Ints size, Tensor filter, Tensor grad, Out dx, Attributes attributes), {
      const auto how = convolution(attributes);
      const auto cube = cube_math(true);
      SHAPE(dx, size);
      SHAPE(grad, convolved(dx, filter, how));
      COMPUTE { dx.copy_(slope(0, upcast(cube(grad)), upcast(dx), upcast(cube(filter)), how)); };
    })
GRAPH_OP(
    Conv2DBackpropFilter, (Tensor x, Ints size, Tensor grad, Out dfilter, Attributes attributes), {
      const auto how = convolution(attributes);
      const auto cube = cube_math(true);
      SHAPE(dfilter, size);
      SHAPE(grad, convolved(x, dfilter, how));
      COMPUTE {
        dfilter.copy_(slope(1, upcast(cube(grad)), upcast(cube(x)), upcast(dfilter), how));
      };
    })
GRAPH_OP(ReduceSum, (Tensor x, Ints axes, Out y, Attributes attributes), {
  const bool keep = attributes.get("keep_dims", false);
  REDUCED(y, x, axes, keep);
  COMPUTE { y.copy_(at::sum(upcast(x), axes, keep)); };
})
#define LEGACY_EXTREME(TYPE, FUNCTION)                                  \
  GRAPH_OP(TYPE, (Tensor x, Ints axes, Out y, Attributes attributes), { \
    const bool keep = attributes.get("keep_dims", false);               \
    REDUCED(y, x, axes, keep);                                          \
    COMPUTE { y.copy_(at::FUNCTION(x, axes, keep)); };                  \
  })
LEGACY_EXTREME(ReduceMin, amin)
LEGACY_EXTREME(ReduceMax, amax)

#define LEGACY_SOFTMAX(TYPE, FUNCTION)                                    \
  GRAPH_OP(TYPE, (Tensor x, Out y, Attributes attributes), {              \
    const auto dim = only_dim(attributes.get("axes", Ints{-1}), x.dim()); \
    COMPUTE { y.copy_(at::FUNCTION(upcast(x), dim)); };                   \
  })
LEGACY_SOFTMAX(SoftmaxV2, softmax)
LEGACY_SOFTMAX(LogSoftmaxV2, log_softmax)

// A byte for each value, 1 where it is kept; what rounds the mask up stays 0. Only the seed
// decides: two calls with the same one draw the same mask (DropoutWithByteMaskKernelNpu.cpp).
GRAPH_OP(DropOutGenMaskV3, (Ints sizes, Scalar keep, Out mask, Attributes attributes), {
  const auto seed = attributes.get("seed", int64_t{0});
  const auto second = attributes.get("seed2", int64_t{0});
  const auto probability = keep.toDouble();
  within("prob", probability, 0.0, 1.0);
  const auto values = c10::multiply_integers(sizes);
  require(mask.numel() >= values, "mask has ", mask.numel(), " values for ", values);
  COMPUTE {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed + (second << 32)));
    mask.zero_();
    mask.view(-1).narrow(0, 0, values).bernoulli_(probability, generator);
  };
})
GRAPH_OP(DropOutDoMaskV3, (Tensor x, Tensor mask, Scalar keep, Out y), {
  const auto probability = keep.toDouble();
  kept_of(mask, x);
  COMPUTE { y.copy_(dropped(upcast(x), mask, probability)); };
})

GRAPH_OP(AxpyWithSoftmaxAndDropOutDoMask,
    (Tensor x1, Tensor x2, Tensor mask, Out softmax, Out y, Attributes attributes), {
      const auto alpha = attributes.get("alpha", 1.0f);
      const auto keep = attributes.get("input_keep_prob", 1.0f);
      const auto dim = only_dim(attributes.get("axis", Ints{-1}), x1.dim());
      kept_of(mask, x1);
      COMPUTE {
        const auto value = at::softmax(upcast(x1) + upcast(x2) * alpha, dim);
        softmax.copy_(value);
        y.copy_(dropped(value, mask, keep));
      };
    })
// Of x2, which was multiplied by alpha.
GRAPH_OP(DropoutWithMulsAndSoftmaxGrad,
    (Tensor grad, Tensor mask, Tensor softmax, Out dx, Attributes attributes), {
      const auto alpha = attributes.get("alpha", 1.0f);
      const auto keep = attributes.get("input_keep_prob", 1.0f);
      const auto dim = only_dim(attributes.get("axes", Ints{-1}), softmax.dim());
      kept_of(mask, grad);
      COMPUTE {
        const auto value = upcast(softmax);
        const auto inner = dropped(upcast(grad), mask, keep) * value;
        dx.copy_((inner - value * inner.sum(dim, true)) * alpha);
      };
    })

// TensorFlow's: the gradient is that of labels whose sum is 1.
GRAPH_OP(SoftmaxCrossEntropyWithLogits, (Tensor features, Tensor labels, Out loss, Out backprop), {
  SHAPE(loss, {features.size(0)});
  COMPUTE {
    const auto logs = at::log_softmax(upcast(features), -1);
    loss.copy_((upcast(labels) * logs).sum(-1).neg());
    backprop.copy_(logs.exp() - upcast(labels));
  };
})

GRAPH_OP(LayerNormV3,
    (Tensor x, Tensor gamma, Tensor beta, Out y, Out mean, Out rstd, Attributes attributes), {
      const auto begin =
          real_dim(attributes.get("begin_norm_axis", int64_t{0}), x.dim(), "begin_norm_axis");
      const auto epsilon = attributes.get("epsilon", 1e-5f);
      attributes.only("begin_params_axis", begin);
      const auto normalized = x.sizes().slice(begin);
      SHAPE(gamma, normalized);
      SHAPE(beta, normalized);
      COMPUTE {
        const auto [value, center, scale] =
            at::native_layer_norm(upcast(x), normalized, upcast(gamma), upcast(beta), epsilon);
        y.copy_(value);
        mean.copy_(center.view(mean.sizes()));
        rstd.copy_(scale.view(rstd.sizes()));
      };
    })

// All inputs have the shape [..., P, R, M] of the differences; dx is their sum over R. Maximum
// norm: p = -1 (CdistBackwardKernelNpu.cpp). Where the distance is 0, so is the gradient.
GRAPH_OP(CdistGrad,
    (Tensor grad, Tensor x1, Tensor x2, Tensor distance, Out dx, Attributes attributes), {
      const double p = attributes.get("p", 2.0f);
      Ints expected = x1.sizes().vec();
      require(expected.size() >= 3, "x1 has shape ", x1.sizes(), "; allowed: 3 dimensions or more");
      expected.erase(expected.end() - 2);
      SHAPE(dx, expected);
      COMPUTE {
        const auto difference = upcast(x1) - upcast(x2);
        const auto length = upcast(distance);
        const auto size = difference.abs();
        Tensor each = upcast(grad) * difference.sign();
        if (p == 0) each = at::zeros_like(each);
        else if (p < 0) each = each * size.ge(length);
        else if (p != 1) each = each * power_of(size, p - 1) * power_of(length, 1 - p);
        dx.copy_(at::where(length.eq(0), 0, each).sum(-2));
      };
    })
