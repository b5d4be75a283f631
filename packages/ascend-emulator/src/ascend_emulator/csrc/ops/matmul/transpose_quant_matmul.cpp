// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_transpose_quant_batchmatmul, on Ascend950: x1 [m, batch, k] @ x2 [batch, k, n] as
// [m, batch, n]. Semantics and limits: op-plugin's page of it (docs/zh/custom_APIs/torch_npu, BSD).
#include "float_product.h"

using namespace emu;

CHECKED(aclnnTransposeQuantBatchMatMul,
    (Tensor x1, Tensor x2, Opt<Tensor> bias, Opt<Tensor> x1_scale, Opt<Tensor> x2_scale, int32_t,
        int64_t, Ints perm_x1, Ints perm_x2, Ints perm_y, int64_t batch_split, Tensor out),
    {
      rule("transpose_quant_matmul.permutations",
          perm_x1 == Ints{1, 0, 2} && (perm_x2 == Ints{0, 1, 2} || perm_x2 == Ints{0, 2, 1}) &&
              perm_y == Ints{1, 0, 2},
          "perm_x1, perm_x2 and perm_y are ", listed(perm_x1), ", ", listed(perm_x2), " and ",
          listed(perm_y), "; allowed: 1, 0, 2, then 0, 1, 2 or 0, 2, 1, and 1, 0, 2");
      const auto left = x1.transpose(0, 1), right = x2.permute(perm_x2);
      const int64_t m = left.size(1), k = left.size(2), n = right.size(2), batches = left.size(0);
      const bool exponents = x2_scale && x2_scale->scalar_type() == at::kFloat8_e8m0fnu,
                 hif8 = x1.scalar_type() == at::kBits8;
      rule("transpose_quant_matmul.sizes", right.size(0) == batches && right.size(1) == k,
          "x1 has shape ", x1.sizes(), " and x2 ", x2.sizes());
      if (exponents) {
        rule("transpose_quant_matmul.exponents", [&] {
          multiple("k", k, 2 * kGroup);
          require(x1_scale && x1.scalar_type() == at::kFloat8_e4m3fn &&
                      x2.scalar_type() == at::kFloat8_e4m3fn,
              "x1 is ", x1.scalar_type(), "; float8_e4m3fn and both scales are needed");
          const int64_t pairs = k / (2 * kGroup);
          shape("x1_scale", *x1_scale, {m, batches, pairs, 2});
          shape("x2_scale", x2_scale->transpose(1, perm_x2[1]), {batches, pairs, n, 2});
        });
      } else {
        rule("transpose_quant_matmul.scales", [&] {
          require(x2_scale.has_value(), "x2_scale is None; it is needed");
          shape("x2_scale", *x2_scale, {n});
          require(hif8 || x1_scale, "x1_scale is None; HiF8 needs none");
          if (x1_scale) shape("x1_scale", *x1_scale, {hif8 ? 1 : m});
        });
        rule("transpose_quant_matmul.float8", hif8 || (k == 512 && n == 128 && perm_x2[1] == 1),
            "k is ", k, ", n ", n, " and perm_x2 ", listed(perm_x2),
            "; without float8_e8m0fnu scales 512, 128 and 0, 1, 2 are allowed");
      }
      COMPUTE {
        auto a = decoded(x1.contiguous()).transpose(0, 1),
             b = decoded(x2.contiguous()).permute(perm_x2);
        if (exponents) {
          a = a *
              factors_of_groups(x1_scale->transpose(0, 1), k, true).repeat_interleave(kGroup, -1);
          b = b * factors_of_groups(x2_scale->transpose(1, perm_x2[1]), k, false)
                      .repeat_interleave(kGroup, -2);
        }
        auto values = at::matmul(a, b);
        if (!exponents) {
          values = values * x2_scale->to(at::kFloat);
          if (x1_scale) values = values * x1_scale->to(at::kFloat).reshape({-1, 1});
        }
        const auto turned = values.transpose(0, 1);
        if (is_low_precision(out)) encode(turned, out, formats::Rounding::round, true);
        else out.copy_(turned);
      };
    })
