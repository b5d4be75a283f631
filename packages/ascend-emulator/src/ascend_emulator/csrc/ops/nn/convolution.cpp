// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Convolutions and their gradients.
#include "ops/cube_math.h"
#include "ops/upcast.h"

using namespace emu;

// Twice as many paddings as dimensions: one per side (op-plugin's
// NnpackSpatialConvolutionKernelNpuOpApi.cpp).
CHECKED(aclnnConvolution,
    (Tensor input, Tensor weight, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation,
        bool transposed, Ints output_padding, int64_t groups, Tensor out, CubeMath cube),
    {
      cube.check(input, weight);
      rule("convolution.output-padding",
          !transposed || input.dim() != 5 || is_chip("Ascend950") ||
              output_padding == Ints(output_padding.size()),
          "output_padding is [", listed(output_padding),
          "]; transposed convolutions of three dimensions take 0");
      require(
          weight.numel() > 0, "weight has the shape ", weight.sizes(), "; no dimension may be 0");
      COMPUTE {
        auto from = upcast(cube(input));
        if (padding.size() == 2 * stride.size()) {
          Ints sides;  // from the last dimension to the first, for constant_pad_nd
          for (size_t i = stride.size(); i-- > 0;)
            sides.insert(sides.end(), {padding[2 * i], padding[2 * i + 1]});
          from = at::constant_pad_nd(from, sides);
          padding.assign(stride.size(), 0);
        }
        out.copy_(at::convolution(from, upcast(cube(weight)), upcast(bias), stride, padding,
            dilation, transposed, output_padding, groups));
      };
    })
namespace {
void check_output_padding(const Ints& stride, const Ints& output_padding) {
  rule("convolution_backward.output-padding", [&] {
    for (size_t i = 0; i < std::min(stride.size(), output_padding.size()); ++i)
      require(output_padding[i] < stride[i], "output_padding is [", listed(output_padding),
          "] and stride [", listed(stride), "]; it must be smaller");
  });
}
}  // namespace
// The bias's gradient is a sum, not a matmul.
SHAPED(aclnnConvolutionBackward,
    (Tensor grad, Tensor input, Tensor weight, Opt<Ints> bias_sizes, Ints stride, Ints padding,
        Ints dilation, bool transposed, Ints output_padding, int64_t groups, Bools mask,
        CubeMath cube, Opt<Tensor> grad_input, Opt<Tensor> grad_weight, Opt<Tensor> grad_bias),
    (cube.check(grad, input, weight),
        transposed ? check_output_padding(stride, output_padding) : void()),
    {
      const auto backward = [&](const Tensor& g, const Tensor& from, const Tensor& by,
                                std::array<bool, 3> wanted) {
        return at::convolution_backward(upcast(g), upcast(from), upcast(by),
            bias_sizes ? at::OptionalIntArrayRef(*bias_sizes) : std::nullopt, stride, padding,
            dilation, transposed, output_padding, groups, wanted);
      };
      if (mask[2])
        copy_if_given(grad_bias, std::get<2>(backward(grad, input, weight, {false, false, true})));
      const auto [x, w, none] =
          backward(cube(grad), cube(input), cube(weight), {mask[0], mask[1], false});
      copy_if_given(grad_input, x);
      copy_if_given(grad_weight, w);
    })
SHAPED(aclnnConvDepthwise2d,
    (Tensor self, Tensor weight, Ints, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation,
        Tensor out, CubeMath cube),
    cube.check(self, weight), {
      out.copy_(at::conv2d(upcast(cube(self)), upcast(cube(weight)), upcast(bias), stride, padding,
          dilation, self.size(-3)));
    })
SHAPED(aclnnConvTbc,
    (Tensor self, Tensor weight, Tensor bias, int64_t padding, Tensor out, CubeMath cube),
    cube.check(self, weight),
    { out.copy_(at::conv_tbc(upcast(cube(self)), upcast(cube(weight)), upcast(bias), padding)); })
SHAPED(aclnnConvTbcBackward,
    (Tensor grad, Tensor input, Tensor weight, Tensor bias, int64_t padding, CubeMath cube,
        Tensor grad_input, Tensor grad_weight, Tensor grad_bias),
    cube.check(grad, input, weight), {
      const auto [x, w, b] = at::conv_tbc_backward(
          upcast(cube(grad)), upcast(cube(input)), upcast(cube(weight)), upcast(bias), padding);
      grad_input.copy_(x);
      grad_weight.copy_(w);
      grad_bias.copy_(upcast(grad).sum(at::IntArrayRef({0, 1})));
    })
OP(aclnnIm2col, (Tensor self, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::im2col(self, kernel, dilation, padding, stride)); })
OP(aclnnIm2colBackward,
    (Tensor self, Ints size, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::col2im(upcast(self), size, kernel, dilation, padding, stride)); })
