// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// int8 keys and values of the fused inference attention.
#pragma once
#include "attention.h"

namespace emu::attention {

// Dequantization of int8 keys or values: (x + offset) * scale; modes of key_antiquant_mode.
struct Antiquant {
  Tensor scale, offset;
  int64_t mode = 0;

  // Scale or offset as [groups or 1, length or 1, D or 1].
  Tensor factor(const Tensor& x, int64_t request, int64_t length, int64_t groups,
      const Tensor& table, int64_t block_size) const {
    const auto fp32 = x.to(at::kFloat);
    switch (mode) {
      case 0: return fp32.numel() == 1 ? fp32.reshape({1, 1, 1}) : fp32.reshape({groups, 1, -1});
      case 1:
        return fp32.reshape({-1, fp32.size(-1)})[request]
            .narrow(0, 0, length)
            .reshape({1, length, 1});
      case 2: return fp32.reshape({groups, 1, 1});
      case 3:
        return fp32.reshape({-1, groups, fp32.size(-1)})[request]
            .narrow(1, 0, length)
            .unsqueeze(-1);
      case 4: return pages(fp32.unsqueeze(-1), table, request, length, 1, block_size);
      case 5: return pages(fp32.unsqueeze(-1), table, request, length, groups, block_size);
    }
    raise(kOpParam, {"antiquant mode ", mode, "; supported: 0 to 5"});
  }
  Tensor operator()(const Tensor& rows, int64_t request, int64_t groups, const Tensor& table,
      int64_t block_size) const {
    if (rows.scalar_type() != at::kChar) return rows;
    auto fp32 = rows.to(at::kFloat);
    if (offset.defined())
      fp32 = fp32 + factor(offset, request, rows.size(1), groups, table, block_size);
    return fp32 * factor(scale, request, rows.size(1), groups, table, block_size);
  }
};

}  // namespace emu::attention
