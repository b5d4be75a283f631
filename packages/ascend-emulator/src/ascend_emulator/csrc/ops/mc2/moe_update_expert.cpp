// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_moe_update_expert: maps logical to physical experts and prunes choices of small weight,
// before dispatch. Semantics and limits: torch_npu's documentation of it (op-plugin's
// docs/zh/custom_APIs/torch_npu, BSD) and op-plugin's test_moe_update_expert.py.
#include "moe_distribute.h"

using namespace emu;
using mc2::absent;

CHECKED(aclnnMoeUpdateExpert,
    (Tensor expert_ids, Tensor table, Opt<Tensor> scales, Opt<Tensor> threshold, Opt<Tensor> active,
        int64_t rank_id, int64_t world_size, int64_t mode, Tensor out, Tensor out_mask),
    {
      const int64_t tokens = expert_ids.size(0), choices = expert_ids.size(1),
                    experts = table.size(0);
      within("K (the columns of expert_ids)", choices, int64_t{1}, std::min<int64_t>(16, experts));
      if (mode == 0) {
        within("local_rank_id", rank_id, int64_t{0}, world_size - 1);
        within("the columns of eplb_table", table.size(1), int64_t{2}, world_size + 1);
      }
      require(absent(scales) == absent(threshold),
          "expert_scales and pruning_threshold are needed together");
      require(absent(active) || !absent(scales),
          "active_mask is given without expert_scales and pruning_threshold");
      if (!absent(scales))
        require(threshold->numel() == choices, "pruning_threshold has shape ", threshold->sizes(),
            "; allowed: [", choices, "] and [1, ", choices, "]");
      COMPUTE {
        const auto id = expert_ids.to(at::kLong), places = table.to(at::kLong);
        require(at::all(at::logical_and(id >= 0, id < experts)).item<bool>(),
            "expert_ids has values that are not in 0 to ", experts - 1);
        const auto counts = places.select(1, 0);
        require(at::all(at::logical_and(counts >= 1, counts < table.size(1))).item<bool>(),
            "eplb_table has instance counts that are not in 1 to ", table.size(1) - 1);
        const auto number = counts.index({id});
        Tensor which;  // of the instances
        if (mode == 1) {
          which = at::arange(tokens, at::kLong).unsqueeze(1) % number;
        } else {
          which = at::floor_divide(
              at::full_like(number, rank_id), at::floor_divide(number + (world_size - 1), number));
        }
        out.copy_(places.index({id, which + 1}));
        if (absent(scales)) return;
        const auto fp32 = scales->to(at::kFloat);
        auto kept = fp32 >= fp32.sum(1, true) * threshold->reshape({1, choices});
        if (!absent(active)) kept = at::logical_and(kept, mc2::active_choices(expert_ids, active));
        out_mask.copy_(kept);
      };
    })
