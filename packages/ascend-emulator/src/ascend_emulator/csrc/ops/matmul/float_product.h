// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// A matmul in formats of eight and four bits, on Ascend950. Semantics: CANN's API
// reference, "aclnnQuantMatmulV5", for the formulas of scales; layouts of shared exponents:
// torch_npu's documentation of npu_all_gather_quant_mm (torch_npu/_op_plugin_docs.py, BSD).
#pragma once
#include "ops/quantization/low_precision.h"

namespace emu {

// x1 [..., m, k] @ x2 [..., k, n]. The scales of x2 and x1 are
// - shared exponents of 32 values, [..., ceil(k / 64), n, 2] and [..., m, ceil(k / 64), 2];
// - of blocks, [..., ceil(k / 128), ceil(n / 128)] and [..., ceil(m / rows), ceil(k / 128)], where
//   rows is 1 or 128;
// - of columns [n] or one, and of rows [m] or one or absent.
struct FloatProduct {
  Tensor x1, x2, scale;
  Opt<Tensor> pertoken, bias;
  int64_t block_rows;  // of a block of x1, 0: by the scale's shape
  Tensor out;

  int64_t m() const { return out.size(-2); }
  int64_t n() const { return out.size(-1); }
  int64_t k() const { return columns_of(x1); }
  bool exponents() const { return scale.scalar_type() == at::kFloat8_e8m0fnu; }
  bool row_scales() const { return pertoken && pertoken->numel() > 0; }
  bool blocks() const;
  int64_t rows_of_block() const;

  void check() const;
  void run() const;

 private:
  void check_exponents() const;
  void check_scales() const;
};

}  // namespace emu
