// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_moe_distribute_combine[_v2] and npu_moe_distribute_combine_add_rms_norm; see
// moe_distribute.h. The expert's rank finds the source of its rows in ep_send_counts, the token's
// rank finds what it sent in expert_ids.
#include "moe_distribute.h"

using namespace emu;

namespace emu::mc2 {

void Combine::check_arguments() const {
  one_of("expand_x", expand_x, kHalves);
  rank("expand_x", expand_x, 2);
  const int64_t hidden = expand_x.size(1), tokens = ids.size(0);
  at.check_tokens(ids, mask, hidden, false);
  at.check_buffer(tokens, ids.size(1), hidden, expand_x.element_size());
  require(expand_x.size(0) >= at.most_rows(ids.size(1)), "expand_x has ", expand_x.size(0),
      " rows; it must have at least ", at.most_rows(ids.size(1)));
  one_of("ep_send_counts", counts, {at::kInt});
  const int64_t needed = at.local(at.on->rank) * at.ranks();
  require(counts.dim() == 1 && counts.numel() >= needed, "ep_send_counts has shape ",
      counts.sizes(), "; it must be at least [", needed, "]");
  one_of("expert_scales", scales, {at::kFloat});
  shape("expert_scales", scales, ids.sizes());
  const bool first = at.version == Version::one;
  const char* name = first ? "expand_idx" : "assist_info_for_combine";
  one_of(name, info, {at::kInt});
  rank(name, info, 1);
  const int64_t length = first ? ids.numel() : 128 * at.most_rows(ids.size(1));
  require(info.numel() >= length, name, " has ", info.numel(), " elements; it must have at least ",
      length);
  const auto like = [&](const char* argument, const Opt<Tensor>& tensor, bool needed,
                        at::IntArrayRef form) {
    require(
        !needed || !absent(tensor), argument, " is None; it is needed with these special experts");
    if (absent(tensor)) return;
    same_dtype(argument, *tensor, "expand_x", expand_x);
    shape(argument, *tensor, form);
  };
  like("ori_x", original, at.copy || at.constant, {tokens, hidden});
  like("const_expert_alpha_1", alpha1, at.constant, {at.constant, hidden});
  like("const_expert_alpha_2", alpha2, at.constant, {at.constant, hidden});
  like("const_expert_v", added, at.constant, {at.constant, hidden});
  if (absent(shared_x)) return;
  if (first || is_chip("Ascend910B")) reserved("shared_expert_x", shared_x);
  same_dtype("shared_expert_x", *shared_x, "expand_x", expand_x);
  rank("shared_expert_x", *shared_x, 2, 3);
  require(shared_x->size(-1) == hidden && shared_x->numel() == tokens * hidden,
      "shared_expert_x has shape ", shared_x->sizes(), "; it must be [", tokens, ", ", hidden,
      "], whose first dimension may be split");
}

void Combine::run(const std::function<void(const Tensor&)>& use) const {
  const auto call = hccl::fused_header(hccl::kCombine, expand_x.scalar_type(), expand_x.size(1));
  hccl::fused(*at.on, call, [&] {
    at.check_same_on_all_ranks(call, ids.size(1), {});
    const int64_t ranks = at.ranks(), own = at.local(at.on->rank), hidden = expand_x.size(1),
                  tokens = ids.size(0), choices = ids.size(1);
    // This rank's rows of each source, by local expert.
    const auto ends = counts.contiguous(), origin = info.contiguous();
    const auto* end = ends.const_data_ptr<int32_t>();
    const auto* from = origin.const_data_ptr<int32_t>();
    std::vector<std::vector<int64_t>> rows(ranks);
    int64_t row = 0;
    for (int64_t i = 0; i < own * ranks; ++i) {
      require(end[i] >= row && end[i] <= expand_x.size(0), "ep_send_counts[", i, "] is ", end[i],
          "; allowed: ", row, " to ", expand_x.size(0), "; it must be what the dispatch gave");
      for (; row < end[i]; ++row) {
        require(at.version == Version::one || from[3 * row] == i % ranks,
            "assist_info_for_combine does not go with ep_send_counts (row ", row,
            "); both must be what the dispatch gave");
        rows[i % ranks].push_back(row);
      }
    }
    const auto routes = at.route(ids, mask);
    std::vector<Tensor> out, in;
    std::vector<std::vector<int64_t>> which(choices + at.shared),
        where(choices + at.shared);  // by choice: tokens with a result, and its row
    int64_t place = 0;
    for (int64_t peer = 0; peer < ranks; ++peer) {
      out.push_back(expand_x.index_select(0, from_ints(rows[peer])));
      const int64_t before = place;
      for (const auto& slots : routes[peer]) {
        for (size_t i = 0; i < slots.size(); ++i) {
          const auto [token, choice] = slots[i];
          require(at.version == Version::two || choice >= choices ||
                      from[token * choices + choice] == static_cast<int32_t>(i),
              "expand_idx[", token * choices + choice, "] is ", from[token * choices + choice],
              "; it must be what the dispatch of these expert_ids gave, ", i);
          which[choice].push_back(token);
          where[choice].push_back(place++);
        }
      }
      in.push_back(at::empty({place - before, hidden}, expand_x.options()));
    }
    hccl::exchange(*at.on, call, out, in);
    const auto answers = at::cat(in).to(at::kFloat);
    auto sum = at::zeros({tokens, hidden}, at::kFloat);
    for (int64_t k = 0; k < choices + at.shared; ++k) {
      const auto token = from_ints(which[k]);
      auto values = answers.index_select(0, from_ints(where[k]));
      if (k < choices) values = values * scales.select(1, k).index_select(0, token).unsqueeze(1);
      sum.index_add_(0, token, values);
      if (k < choices && at.all_experts() > at.experts) add_special(sum, k);
    }
    if (!absent(shared_x)) sum += shared_x->reshape({tokens, hidden}).to(at::kFloat);
    use(sum);
  });
}

void Combine::add_special(const Tensor& sum, int64_t k) const {
  const auto id = ids.select(1, k).to(at::kLong), active = active_choices(ids, mask).select(1, k);
  const auto add = [&](int64_t first, int64_t number, auto&& value) {
    const auto token = at::logical_and(active, at::logical_and(id >= first, id < first + number))
                           .nonzero()
                           .squeeze(1);
    if (!token.numel()) return;
    const auto weight = scales.select(1, k).index_select(0, token).unsqueeze(1);
    sum.index_add_(0, token,
        value(original->index_select(0, token).to(at::kFloat), id.index_select(0, token) - first) *
            weight);
  };
  const int64_t copies = at.experts + at.zero, constants = copies + at.copy;  // the first ids
  if (at.copy) add(copies, at.copy, [](const Tensor& x, const Tensor&) { return x; });
  if (!at.constant) return;
  add(constants, at.constant, [&](const Tensor& x, const Tensor& which) {
    const auto of = [&](const Opt<Tensor>& parameter) {
      return parameter->index_select(0, which).to(at::kFloat);
    };
    return of(alpha1) * x + of(alpha2) * of(added);
  });
}

}  // namespace emu::mc2

using namespace emu::mc2;

namespace {

// "必选参数" on A2 and with comm_alg hierarchy, otherwise "暂不支持该参数".
void check_expand_scales(const Combine& one, const Opt<Tensor>& scales) {
  const bool a2 = is_chip("Ascend910B"), levels = one.at.algorithm == "hierarchy";
  if (!a2 && !levels) return reserved("expand_scales", scales);
  require(!absent(scales), "expand_scales is None; ",
      a2 ? "on Ascend910B" : "with comm_alg hierarchy",
      " it is needed: what the dispatch returned as expand_scales");
  one_of("expand_scales", *scales, {at::kFloat});
  shape("expand_scales", *scales, {one.expand_x.size(0)});
}

void no_quantized_values(int64_t quant_mode) {
  require(quant_mode == 0, "comm_quant_mode is ", quant_mode,
      "; 0 is emulated: how communicated values are quantized is not documented");
}

Computation combine(
    const Combine& one, const Opt<Tensor>& expand_scales, int64_t quant_mode, const Tensor& out) {
  one.check_arguments();
  check_expand_scales(one, expand_scales);
  no_quantized_values(quant_mode);
  shape("out", out, {one.ids.size(0), one.expand_x.size(1)});
  one.at.on->claim(hccl::kCombine);
  return [=] { one.run([&](const Tensor& sum) { out.copy_(sum); }); };
}

Computation combine_norm(const Combine& one, const Tensor& residual_x, const Tensor& gamma,
    int64_t quant_mode, float eps, const Tensor& y, const Tensor& rstd, const Tensor& x) {
  chips({"Ascend910_93"});
  one_of("expand_x", one.expand_x, {at::kBFloat16});
  same_dtype("residual_x", residual_x, "expand_x", one.expand_x);
  same_dtype("gamma", gamma, "expand_x", one.expand_x);
  const int64_t tokens = one.ids.size(0), hidden = one.expand_x.size(-1);
  shape("residual_x", residual_x, {tokens, 1, hidden});
  shape("gamma", gamma, {hidden});
  no_quantized_values(quant_mode);
  one.check_arguments();
  one.at.on->claim(hccl::kCombine);
  COMPUTE {
    one.run([&](const Tensor& combined) {
      const auto sum = combined.unsqueeze(1) + residual_x.to(at::kFloat);
      const auto scale = (sum.square().mean(-1, true) + eps).rsqrt();
      x.copy_(sum);
      rstd.copy_(scale);
      y.copy_(sum * scale * gamma.to(at::kFloat));
    });
  };
}

}  // namespace

FUSED(aclnnMoeDistributeCombine,
    (Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor counts, Tensor expert_scales,
        Opt<Tensor>, Opt<Tensor> x_active_mask, Opt<Tensor> activation_scale,
        Opt<Tensor> weight_scale, Opt<Tensor> group_list, Opt<Tensor> expand_scales, Text group_ep,
        int64_t ep_world_size, int64_t ep_rank_id, int64_t moe_expert_num, Text,
        int64_t tp_world_size, int64_t, int64_t shard_type, int64_t shared_num,
        int64_t shared_rank_num, int64_t global_bs, int64_t, int64_t quant_mode, int64_t,
        Tensor out),
    {
      reserved("activation_scale", activation_scale);
      reserved("weight_scale", weight_scale);
      reserved("group_list", group_list);
      return combine(
          {{Version::one, group_ep, ep_world_size, ep_rank_id, moe_expert_num, tp_world_size,
               shard_type, shared_num, shared_rank_num, global_bs, "", 0, 0, 0},
              expand_x, expert_ids, expand_idx, counts, expert_scales, x_active_mask, {}, {}, {},
              {}, {}},
          expand_scales, quant_mode, out);
    })

// ELASTIC, INPUTS and SPECIAL: parameters from V3 on; TIMES: from V4 on.
#define COMBINE(NAME, ELASTIC, INPUTS, TIMES, SPECIAL, FIRST)                                  \
  FUSED(NAME,                                                                                  \
      (Tensor expand_x, Tensor expert_ids, Tensor info, Tensor counts, Tensor expert_scales,   \
          Opt<Tensor>, Opt<Tensor> x_active_mask, Opt<Tensor> activation_scale,                \
          Opt<Tensor> weight_scale, Opt<Tensor> group_list, Opt<Tensor> expand_scales,         \
          Opt<Tensor> shared_x, ELASTIC INPUTS TIMES Text group_ep, int64_t ep_world_size,     \
          int64_t ep_rank_id, int64_t moe_expert_num, Text, int64_t tp_world_size, int64_t,    \
          int64_t shard_type, int64_t shared_num, int64_t shared_rank_num, int64_t global_bs,  \
          int64_t, int64_t quant_mode, int64_t, Text comm_alg, SPECIAL Tensor out),            \
      {                                                                                        \
        reserved("activation_scale", activation_scale);                                        \
        reserved("weight_scale", weight_scale);                                                \
        reserved("group_list", group_list);                                                    \
        FIRST;                                                                                 \
        return combine({{Version::two, group_ep, ep_world_size, ep_rank_id, moe_expert_num,    \
                            tp_world_size, shard_type, shared_num, shared_rank_num, global_bs, \
                            comm_alg, zero_num, copy_num, const_num},                          \
                           expand_x, expert_ids, info, counts, expert_scales, x_active_mask,   \
                           shared_x, ori_x, alpha1, alpha2, const_v},                          \
            expand_scales, quant_mode, out);                                                   \
      })
COMBINE(aclnnMoeDistributeCombineV2, , , , , NO_SPECIAL_EXPERTS; NO_SPECIAL_INPUTS)
COMBINE(aclnnMoeDistributeCombineV3, ELASTIC_INFO, SPECIAL_INPUTS, , SPECIAL_EXPERTS,
    reserved("elastic_info", elastic_info))
COMBINE(aclnnMoeDistributeCombineV4, ELASTIC_INFO, SPECIAL_INPUTS, PERFORMANCE_INFO,
    SPECIAL_EXPERTS, reserved("elastic_info", elastic_info);
    no_times(performance_info))

// y is the normalized sum of the combined tokens and residual_x, x the sum.
#define COMBINE_NORM(NAME, ELASTIC, INPUTS, SPECIAL, FIRST)                                       \
  FUSED(NAME,                                                                                     \
      (Tensor expand_x, Tensor expert_ids, Tensor info, Tensor counts, Tensor expert_scales,      \
          Tensor residual_x, Tensor gamma, Opt<Tensor>, Opt<Tensor> x_active_mask,                \
          Opt<Tensor> activation_scale, Opt<Tensor> weight_scale, Opt<Tensor> group_list,         \
          Opt<Tensor>, Opt<Tensor> shared_x, ELASTIC INPUTS Text group_ep, int64_t ep_world_size, \
          int64_t ep_rank_id, int64_t moe_expert_num, Text, int64_t tp_world_size, int64_t,       \
          int64_t shard_type, int64_t shared_num, int64_t shared_rank_num, int64_t global_bs,     \
          int64_t, int64_t quant_mode, int64_t, Text comm_alg, float eps, SPECIAL Tensor y,       \
          Tensor rstd, Tensor x),                                                                 \
      {                                                                                           \
        reserved("activation_scale", activation_scale);                                           \
        reserved("weight_scale", weight_scale);                                                   \
        reserved("group_list", group_list);                                                       \
        FIRST;                                                                                    \
        return combine_norm({{Version::two, group_ep, ep_world_size, ep_rank_id, moe_expert_num,  \
                                 tp_world_size, shard_type, shared_num, shared_rank_num,          \
                                 global_bs, comm_alg, zero_num, copy_num, const_num},             \
                                expand_x, expert_ids, info, counts, expert_scales, x_active_mask, \
                                shared_x, ori_x, alpha1, alpha2, const_v},                        \
            residual_x, gamma, quant_mode, eps, y, rstd, x);                                      \
      })
COMBINE_NORM(aclnnMoeDistributeCombineAddRmsNorm, , , , NO_SPECIAL_EXPERTS; NO_SPECIAL_INPUTS)
COMBINE_NORM(aclnnMoeDistributeCombineAddRmsNormV2, ELASTIC_INFO, SPECIAL_INPUTS, SPECIAL_EXPERTS,
    reserved("elastic_info", elastic_info))
