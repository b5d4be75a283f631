// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's expert selection by groups. Rules: torch_npu's documentation of npu_fused_add_topk_div
// (torch_npu/op_plugin/atb/_atb_api_docs.py) and the golden function of op-plugin's
// test_atb_group_topk.py.
#include "atb.h"

namespace {

using namespace emu;
using namespace emu::transformer;

// Indices of the k largest values of each row; ties in index order.
Tensor highest(const Tensor& scores, int64_t k) {
  return std::get<1>(at::sort(scores, true, -1, true)).narrow(-1, 0, k);
}

// Mask of the experts in the `kept` groups with the highest score, the sum of a group's `summed`
// largest values.
Tensor in_groups(const Tensor& scores, int64_t groups, int64_t kept, int64_t summed) {
  const auto group_scores =
      std::get<0>(scores.unflatten(-1, {groups, -1}).topk(summed, -1)).sum(-1);
  return at::zeros(group_scores.sizes(), at::kBool)
      .scatter_(-1, highest(group_scores, kept), true)
      .repeat_interleave(scores.size(-1) / groups, -1);
}

void check_groups(const Tensor& x, int64_t groups, int64_t kept, int64_t summed) {
  rank("self", x, 2);
  one_of("self", x, kFloating);
  require(groups > 0 && x.size(1) % groups == 0, "group_num is ", groups, "; ", x.size(1),
      " experts must divide into that many groups");
  within("the number of groups that are kept", kept, int64_t{1}, groups);
  within("n", summed, int64_t{1}, x.size(1) / groups);
}

}  // namespace

// Sets the experts of all but the highest groups to zero, in place.
ATB_PARAMETERS(GroupTopk, 2, 2, "(self, indices)", {
  const auto x = in[0].value, y = out.at(0).value;
  one_of<int>("group_multi_flag", p.by_sum, {0, 1});
  const int64_t summed = p.by_sum ? p.summed : 1;
  check_groups(x, p.groups, p.kept, summed);
  shape("the output", y, x.sizes());
  COMPUTE {
    y.copy_(x.masked_fill(in_groups(x.to(at::kFloat), p.groups, p.kept, summed).logical_not(), 0));
  };
})

// Experts are selected by sigmoid(x) + add_num; weights are sigmoid(x). activation_type: 8 sigmoid.
ATB_OPERATOR(AtbFusedAddTopkDiv,
    (Tensor x, Tensor added, Opt<Tensor>, Opt<Tensor>, int64_t groups, int64_t kept, int64_t summed,
        int64_t k, int activation, bool normalized, float scale, bool mapped, Tensor y,
        Tensor indices),
    {
      one_of<int>("activation_type (8 sigmoid)", activation, {8});
      require_emulated(!mapped,
          "enable_expert_mapping is not emulated: documentation calls its choice pseudo-random");
      check_groups(x, groups, kept, summed);
      shape("add_num", added, {x.size(1)});
      same_dtype("add_num", added, "x", x);
      within("k", k, int64_t{1}, x.size(1) / groups * kept);
      shape("y", y, {x.size(0), k});
      shape("indices", indices, {x.size(0), k});
      COMPUTE {
        const auto gates = at::sigmoid(x.to(at::kFloat)), scores = gates + added.to(at::kFloat);
        const auto masked_out = in_groups(scores, groups, kept, summed).logical_not();
        const auto chosen =
            highest(scores.masked_fill(masked_out, -std::numeric_limits<float>::infinity()), k);
        auto weights = gates.gather(-1, chosen);
        if (normalized) weights = weights / weights.sum(-1, true);
        y.copy_(weights * scale);
        indices.copy_(chosen);
      };
    })
