// Convolutions and their gradients. The unnamed int8_t is the precision of the cube unit; it has no effect here.
#include "ops/wide.h"

using namespace emu;

// Twice as many paddings as dimensions are one for each side (op-plugin's NnpackSpatialConvolutionKernelNpuOpApi.cpp).
CHECKED(aclnnConvolution,
    (Tensor input, Tensor weight, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation, bool transposed,
        Ints output_padding, int64_t groups, Tensor out, int8_t),
    {
      check(weight.numel() > 0, kOpParam, "weight has the shape ", weight.sizes(), "; no dimension may be 0");
      COMPUTE {
        auto from = wide(input);
        if (padding.size() == 2 * stride.size()) {
          Ints sides;  // from the last dimension to the first, as constant_pad_nd wants them
          for (size_t i = stride.size(); i-- > 0;) sides.insert(sides.end(), {padding[2 * i], padding[2 * i + 1]});
          from = at::constant_pad_nd(from, sides);
          padding.assign(stride.size(), 0);
        }
        out.copy_(at::convolution(from, wide(weight), wide(bias), stride, padding, dilation, transposed, output_padding, groups));
      };
    })
OP(aclnnConvolutionBackward,
    (Tensor grad, Tensor input, Tensor weight, Opt<Ints> bias_sizes, Ints stride, Ints padding, Ints dilation, bool transposed,
        Ints output_padding, int64_t groups, Bools mask, int8_t, Opt<Tensor> grad_input, Opt<Tensor> grad_weight,
        Opt<Tensor> grad_bias),
    {
      const auto [x, w, b] = at::convolution_backward(wide(grad), wide(input), wide(weight),
          bias_sizes ? at::OptionalIntArrayRef(*bias_sizes) : std::nullopt, stride, padding, dilation, transposed, output_padding,
          groups, {mask[0], mask[1], mask[2]});
      give(grad_input, x);
      give(grad_weight, w);
      give(grad_bias, b);
    })
OP(aclnnConvDepthwise2d,
    (Tensor self, Tensor weight, Ints, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation, Tensor out, int8_t),
    { out.copy_(at::conv2d(wide(self), wide(weight), wide(bias), stride, padding, dilation, self.size(-3))); })
OP(aclnnConvTbc, (Tensor self, Tensor weight, Tensor bias, int64_t padding, Tensor out, int8_t),
    { out.copy_(at::conv_tbc(wide(self), wide(weight), wide(bias), padding)); })
OP(aclnnConvTbcBackward,
    (Tensor grad, Tensor input, Tensor weight, Tensor bias, int64_t padding, int8_t, Tensor grad_input, Tensor grad_weight,
        Tensor grad_bias),
    {
      const auto [x, w, b] = at::conv_tbc_backward(wide(grad), wide(input), wide(weight), wide(bias), padding);
      grad_input.copy_(x);
      grad_weight.copy_(w);
      grad_bias.copy_(b);
    })
OP(aclnnIm2col, (Tensor self, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::im2col(self, kernel, dilation, padding, stride)); })
OP(aclnnIm2colBackward, (Tensor self, Ints size, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::col2im(wide(self), size, kernel, dilation, padding, stride)); })
