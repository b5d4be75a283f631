// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Casts to and from FRACTAL_NZ. torch_npu's npu_format_cast queries the storage's shape, allocates
// it, and casts into it; the tensor keeps its shape and strides
// (torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp, BSD).
#include "operator/graph_op.h"
#include "operator/op.h"

using namespace emu;

CHECKED(aclnnNpuFormatCast, (Weight source, Stored target), {
  shape("target", target.value, source.sizes());
  same_dtype("target", target.value, "source", source);
  COMPUTE {
    if (target.storage.defined()) Fractal{target.storage, source}.pack();
    else target.value.copy_(source);
  };
})

// The cast of torch_npu 2.10, of later ones on Atlas inference devices, and with jit_compile.
// tensor_of (operator/aclop.cpp) reads and writes the formats.
GRAPH_OP(Identity, (Tensor x, Out y), {
  SAME(y, x);
  same_dtype("y", y, "x", x);
  COMPUTE { y.copy_(x); };
})

// [..., k, n] is stored as [..., n / c0, k / 16, 16, c0] with both rounded up, and c0 values of the
// additional dtype in 32 bytes. The caller frees the shape with delete[].
ACL_API(answers, aclnnNpuFormatCastCalculateSizeAndFormat,
    (const aclTensor* source, int format, int additional, int64_t** dims, uint64_t* rank_out,
        int* format_out),
    {
      required(source);
      auto sizes = source->value.sizes().vec();
      require(format == kND || format == kFractalNZ, "format ", format,
          "; supported: ND (2) and FRACTAL_NZ (29)");
      if (format == kFractalNZ) {
        require(sizes.size() >= 2, "FRACTAL_NZ needs at least two dimensions; found ",
            source->value.sizes());
        one_of("the dtype", source->value,
            {at::kChar, at::kHalf, at::kBFloat16, at::kFloat, at::kInt, at::kFloat8_e4m3fn});
        const int64_t c0 = 32 / static_cast<int64_t>(c10::elementSize(to_scalar_type(additional)));
        require_emulated(
            c0 >= 16, "customize_dtype of four bytes lays out packed int4, which is not emulated");
        const int64_t n = sizes.back(), k = sizes[sizes.size() - 2];
        sizes.resize(sizes.size() - 2);
        sizes.insert(sizes.end(), {(n + c0 - 1) / c0, (k + 15) / 16, 16, c0});
      }
      *dims = new int64_t[sizes.size()];
      std::copy(sizes.begin(), sizes.end(), *dims);
      *rank_out = sizes.size();
      *format_out = format;
    })
