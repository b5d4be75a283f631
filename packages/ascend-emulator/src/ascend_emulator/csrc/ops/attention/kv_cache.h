// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Slot mapping of paged KV caches, for aclnn's and ATB's operators.
#pragma once
#include "core/cost.h"
#include "operator/op.h"

namespace emu {

// A cache as [blocks, block_size, ...row], a view of either layout: "Norm" [blocks, block_size,
// heads, D], "PA_NZ" [blocks, H / c, block_size, c].
inline Tensor by_slot(const Tensor& cache, bool fractal) {
  return fractal ? cache.transpose(1, 2) : cache;
}

// slot = block * block_size + offset. Rows with a negative slot are not written: ATB's operators
// document that, aclnn's refuse such slots by a rule.
struct SlotMapping {
  Tensor rows, where;  // written rows (undefined: all), and their slots
  SlotMapping(const Tensor& slots, int64_t limit) : where(slots.to(at::kLong).contiguous()) {
    const auto* slot = where.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < where.numel(); ++i)
      require(slot[i] < limit, "slot ", slot[i], " is outside the cache of ", limit);
    if (!has_negative(where)) return;
    rows = (where >= 0).nonzero().squeeze(-1);
    where = where.index_select(0, rows);
  }
  static bool has_negative(const Tensor& slots) {
    return slots.numel() && slots.min().item<int64_t>() < 0;
  }
  void put(const Tensor& cache, const Tensor& values, bool fractal) const {
    const auto chosen = rows.defined() ? values.index_select(0, rows) : values;
    cost::partial_access(cache, chosen);
    if (!fractal && cache.is_contiguous()) {
      cache.view({cache.size(0) * cache.size(1), cache.size(2), cache.size(3)})
          .index_copy_(0, where, chosen);
      return;
    }
    const auto view = by_slot(cache, fractal);
    put_rows(view, {at::floor_divide(where, view.size(1)), where.remainder(view.size(1))},
        chosen.reshape({chosen.size(0), view.size(2), view.size(3)}));
  }
};

void check_cache(
    const char* name, const Tensor& cache, const char* rows_name, const Tensor& rows, bool fractal);

// Gathers the tokens of all requests, concatenated; each from block seq_offset / block_size of its
// block table on. Invalid or missing blocks read as zeros.
Computation gather_pages(Tensor key_cache, Tensor value_cache, Tensor tables, Tensor lengths,
    Tensor key, Tensor value, Opt<Tensor> offset, bool fractal, bool cumulative);

}  // namespace emu
