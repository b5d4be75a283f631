// FRACTAL_NZ and back. torch_npu's npu_format_cast asks for the storage's shape, allocates it, and casts into it; a tensor keeps
// its own shape and strides throughout (torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp, BSD). Here the values stay in the
// order of those strides within the larger storage, so that every operator reads an NZ tensor as any other. Only who reads such a
// storage as bytes could tell. One does, and is refused at its next use (operator/tensor.cpp): npu_convert_weight_to_int4pack of
// an NZ weight lays out words itself.
#include "operator/op.h"

using namespace emu;

CHECKED(aclnnNpuFormatCast, (Tensor source, Tensor target), {
  shape("target", target, source.sizes());
  same_dtype("target", target, "source", source);
  COMPUTE { target.copy_(source); };
})

// [..., k, n] is stored as [..., n / c0, k / 16, 16, c0] with both rounded up, and c0 values of the additional dtype in 32 bytes.
// The caller frees the shape with delete[].
ACL_API(answers, aclnnNpuFormatCastCalculateSizeAndFormat,
    (const aclTensor* source, int format, int additional, int64_t** dims, uint64_t* rank_out, int* format_out), {
      required(source);
      auto sizes = source->value.sizes().vec();
      check(format == kND || format == kFractalNZ, kOpParam, "format ", format, "; ND (2) and FRACTAL_NZ (29) are there");
      if (format == kFractalNZ) {
        check(sizes.size() >= 2, kOpParam, "FRACTAL_NZ needs at least two dimensions; found ", source->value.sizes());
        one_of("the dtype", source->value, {at::kChar, at::kHalf, at::kBFloat16, at::kFloat, at::kInt});
        const int64_t c0 = 32 / static_cast<int64_t>(c10::elementSize(to_scalar_type(additional)));
        check(c0 >= 16, kOpParam, "customize_dtype of four bytes lays out packed int4, which is not emulated");
        const int64_t n = sizes.back(), k = sizes[sizes.size() - 2];
        sizes.resize(sizes.size() - 2);
        sizes.insert(sizes.end(), {(n + c0 - 1) / c0, (k + 15) / 16, 16, c0});
      }
      *dims = new int64_t[sizes.size()];
      std::copy(sizes.begin(), sizes.end(), *dims);
      *rank_out = sizes.size();
      *format_out = format;
    })

OP(aclnnMatmulWeightNz, (Tensor self, Tensor weight, Tensor out, int8_t), { at::matmul_out(out, self, weight); })
