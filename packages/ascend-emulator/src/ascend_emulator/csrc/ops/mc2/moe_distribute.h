// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// MoE dispatch and combine over expert-parallel ranks. Semantics and limits: torch_npu's
// documentation of npu_moe_distribute_dispatch[_v2] and npu_moe_distribute_combine[_v2]
// (op-plugin's docs/zh/custom_APIs/torch_npu, BSD), op-plugin's test_moe_distribute_*.py.
#pragma once
#include "mc2.h"

namespace emu::mc2 {

// Version one has narrower limits, and no special experts, masks or algorithms.
enum class Version { one, two };

inline bool absent(const Opt<Tensor>& tensor) {
  return !tensor || !tensor->defined() || tensor->numel() == 0;
}
void reserved(const char* argument, const Opt<Tensor>& tensor);  // throws if it is given

// One copy of a token that is sent to an expert.
struct Slot {
  int64_t token;
  int64_t choice;  // index in its top-k, or k + the shared expert's index
};
using Slots = std::vector<Slot>;

// Arguments shared by dispatch and combine.
struct MoeSettings {
  Text group_ep;
  int64_t ep_world_size, ep_rank_id, moe_expert_num;
  Text group_tp;
  int64_t tp_world_size, tp_rank_id, shard_type, shared_num, shared_rank_num, global_bs, quant_mode;
};
// Their numbers; their ids follow those of the MoE experts.
struct SpecialExperts {
  int64_t zero_num = 0, copy_num = 0, const_num = 0;
  FIELDS(zero_num, copy_num, const_num)
};

// Placement of the experts: ranks of shared experts first, equally many per shared expert; then the
// ranks of MoE experts.
struct Experts {
  Version version;
  std::shared_ptr<hccl::Communicator> on;
  int64_t experts, shared, shared_ranks, global_tokens;
  int64_t zero, copy, constant;  // numbers of special experts
  std::string algorithm;

  Experts(
      Version version, const MoeSettings& at, const Text& algorithm, const SpecialExperts& special);

  void check_tokens(const Tensor& ids, const Opt<Tensor>& mask, int64_t hidden, bool words) const;
  // The communicator's buffer holds what these operators exchange.
  void check_buffer(int64_t tokens, int64_t choices, int64_t hidden, int64_t element) const;
  int64_t ranks() const { return on->ranks; }
  int64_t local(int64_t rank) const {
    return rank < shared_ranks ? 1 : experts / (ranks() - shared_ranks);
  }
  int64_t all_experts() const { return experts + zero + copy + constant; }
  int64_t most_rows(int64_t choices) const;  // maximum number of rows that this rank can receive
  void check_same_on_all_ranks(
      const hccl::Header& call, int64_t choices, std::initializer_list<hccl::RankValue> more) const;

  // Slots to send, by [receiving rank][its local expert], in token order. Throws on invalid ids.
  std::vector<std::vector<Slots>> route(const Tensor& ids, const Opt<Tensor>& mask) const;
};

// Active choices [tokens, k], from a mask of tokens, of choices, or none.
Tensor active_choices(const Tensor& ids, const Opt<Tensor>& mask);

struct CombineInputs {
  Tensor expand_x, expert_ids, info, counts, expert_scales;
  Opt<Tensor> tp_send_counts, x_active_mask, activation_scale, weight_scale, group_list,
      expand_scales;
  FIELDS(expand_x, expert_ids, info, counts, expert_scales, tp_send_counts, x_active_mask,
      activation_scale, weight_scale, group_list, expand_scales)
};
struct SpecialInputs {
  Opt<Tensor> ori_x, alpha1, alpha2, const_v;
  FIELDS(ori_x, alpha1, alpha2, const_v)
};

// Combines the experts' results to this rank's tokens.
struct Combine : CombineInputs, SpecialInputs {
  Experts at;
  Opt<Tensor> shared_x;

  void check_arguments() const;
  void run(const std::function<void(const Tensor&)>& use)
      const;  // `use` receives [tokens, hidden] in float32

 private:
  void add_special(
      const Tensor& sum, int64_t k) const;  // adds the special experts' results of the kth choices
};

Tensor from_ints(const std::vector<int64_t>& values);

inline void no_times(const Opt<Tensor>& performance_info) {
  require_emulated(absent(performance_info),
      "performance_info is given; times of single ranks are not emulated");
}

}  // namespace emu::mc2
