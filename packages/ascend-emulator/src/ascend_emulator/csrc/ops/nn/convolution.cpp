// Convolutions and their gradients. The unnamed int8_t is cubeMathType; it has no effect.
#include "ops/upcast.h"

using namespace emu;

// Twice as many paddings as dimensions: one per side (op-plugin's NnpackSpatialConvolutionKernelNpuOpApi.cpp).
CHECKED(aclnnConvolution,
    (Tensor input, Tensor weight, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation, bool transposed,
        Ints output_padding, int64_t groups, Tensor out, int8_t),
    {
      check(weight.numel() > 0, kOpParam, "weight has the shape ", weight.sizes(), "; no dimension may be 0");
      COMPUTE {
        auto from = upcast(input);
        if (padding.size() == 2 * stride.size()) {
          Ints sides;  // from the last dimension to the first, for constant_pad_nd
          for (size_t i = stride.size(); i-- > 0;) sides.insert(sides.end(), {padding[2 * i], padding[2 * i + 1]});
          from = at::constant_pad_nd(from, sides);
          padding.assign(stride.size(), 0);
        }
        out.copy_(
            at::convolution(from, upcast(weight), upcast(bias), stride, padding, dilation, transposed, output_padding, groups));
      };
    })
OP(aclnnConvolutionBackward,
    (Tensor grad, Tensor input, Tensor weight, Opt<Ints> bias_sizes, Ints stride, Ints padding, Ints dilation, bool transposed,
        Ints output_padding, int64_t groups, Bools mask, int8_t, Opt<Tensor> grad_input, Opt<Tensor> grad_weight,
        Opt<Tensor> grad_bias),
    {
      const auto [x, w, b] = at::convolution_backward(upcast(grad), upcast(input), upcast(weight),
          bias_sizes ? at::OptionalIntArrayRef(*bias_sizes) : std::nullopt, stride, padding, dilation, transposed, output_padding,
          groups, {mask[0], mask[1], mask[2]});
      copy_if_given(grad_input, x);
      copy_if_given(grad_weight, w);
      copy_if_given(grad_bias, b);
    })
OP(aclnnConvDepthwise2d,
    (Tensor self, Tensor weight, Ints, Opt<Tensor> bias, Ints stride, Ints padding, Ints dilation, Tensor out, int8_t),
    { out.copy_(at::conv2d(upcast(self), upcast(weight), upcast(bias), stride, padding, dilation, self.size(-3))); })
OP(aclnnConvTbc, (Tensor self, Tensor weight, Tensor bias, int64_t padding, Tensor out, int8_t),
    { out.copy_(at::conv_tbc(upcast(self), upcast(weight), upcast(bias), padding)); })
OP(aclnnConvTbcBackward,
    (Tensor grad, Tensor input, Tensor weight, Tensor bias, int64_t padding, int8_t, Tensor grad_input, Tensor grad_weight,
        Tensor grad_bias),
    {
      const auto [x, w, b] = at::conv_tbc_backward(upcast(grad), upcast(input), upcast(weight), upcast(bias), padding);
      grad_input.copy_(x);
      grad_weight.copy_(w);
      grad_bias.copy_(b);
    })
OP(aclnnIm2col, (Tensor self, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::im2col(self, kernel, dilation, padding, stride)); })
OP(aclnnIm2colBackward, (Tensor self, Ints size, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out),
    { out.copy_(at::col2im(upcast(self), size, kernel, dilation, padding, stride)); })
