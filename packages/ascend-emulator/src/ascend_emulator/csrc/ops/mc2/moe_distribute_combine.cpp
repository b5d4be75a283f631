// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_moe_distribute_combine[_v2] and npu_moe_distribute_combine_add_rms_norm; see
// moe_distribute.h. The expert's rank finds the source of its rows in ep_send_counts, the token's
// rank finds what it sent in expert_ids.
#include "moe_distribute.h"

using namespace emu;

namespace emu::mc2 {

void Combine::check_arguments() const {
  const int64_t hidden = expand_x.size(1), tokens = expert_ids.size(0);
  at.check_tokens(expert_ids, x_active_mask, hidden, false);
  at.check_buffer(tokens, expert_ids.size(1), hidden, expand_x.element_size());
  require(expand_x.size(0) >= at.most_rows(expert_ids.size(1)), "expand_x has ", expand_x.size(0),
      " rows; it must have at least ", at.most_rows(expert_ids.size(1)));
  const int64_t needed = at.local(at.on->rank) * at.ranks();
  require(counts.numel() >= needed, "ep_send_counts has shape ", counts.sizes(),
      "; it must be at least [", needed, "]");
  const bool first = at.version == Version::one;
  const char* name = first ? "expand_idx" : "assist_info_for_combine";
  const int64_t length = first ? expert_ids.numel() : 128 * at.most_rows(expert_ids.size(1));
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
  like("ori_x", ori_x, at.copy || at.constant, {tokens, hidden});
  like("const_expert_alpha_1", alpha1, at.constant, {at.constant, hidden});
  like("const_expert_alpha_2", alpha2, at.constant, {at.constant, hidden});
  like("const_expert_v", const_v, at.constant, {at.constant, hidden});
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
    at.check_same_on_all_ranks(call, expert_ids.size(1), {});
    const int64_t ranks = at.ranks(), own = at.local(at.on->rank), hidden = expand_x.size(1),
                  tokens = expert_ids.size(0), choices = expert_ids.size(1);
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
    const auto routes = at.route(expert_ids, x_active_mask);
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
    const auto answers = at::concat(in).to(at::kFloat);
    auto sum = at::zeros({tokens, hidden}, at::kFloat);
    for (int64_t k = 0; k < choices + at.shared; ++k) {
      const auto token = from_ints(which[k]);
      auto values = answers.index_select(0, from_ints(where[k]));
      if (k < choices)
        values = values * expert_scales.select(1, k).index_select(0, token).unsqueeze(1);
      sum.index_add_(0, token, values);
      if (k < choices && at.all_experts() > at.experts) add_special(sum, k);
    }
    if (!absent(shared_x)) sum += shared_x->reshape({tokens, hidden}).to(at::kFloat);
    use(sum);
  });
}

void Combine::add_special(const Tensor& sum, int64_t k) const {
  const auto id = expert_ids.select(1, k).to(at::kLong),
             active = active_choices(expert_ids, x_active_mask).select(1, k);
  const auto add = [&](int64_t first, int64_t number, auto&& value) {
    const auto token = at::logical_and(active, at::logical_and(id >= first, id < first + number))
                           .nonzero()
                           .squeeze(1);
    if (!token.numel()) return;
    const auto weight = expert_scales.select(1, k).index_select(0, token).unsqueeze(1);
    sum.index_add_(0, token,
        value(ori_x->index_select(0, token).to(at::kFloat), id.index_select(0, token) - first) *
            weight);
  };
  const int64_t copies = at.experts + at.zero,
                constants = copies + at.copy;  // the first expert_ids
  if (at.copy) add(copies, at.copy, [](const Tensor& x, const Tensor&) { return x; });
  if (!at.constant) return;
  add(constants, at.constant, [&](const Tensor& x, const Tensor& which) {
    const auto of = [&](const Opt<Tensor>& parameter) {
      return parameter->index_select(0, which).to(at::kFloat);
    };
    return of(alpha1) * x + of(alpha2) * of(const_v);
  });
}

}  // namespace emu::mc2

using namespace emu::mc2;

namespace {

// "必选参数" on A2 and with comm_alg hierarchy, otherwise "暂不支持该参数".
void check_expand_scales(const Combine& call) {
  const bool a2 = is_chip("Ascend910B"), levels = call.at.algorithm == "hierarchy";
  if (!a2 && !levels) return reserved("expand_scales", call.expand_scales);
  require(!absent(call.expand_scales), "expand_scales is None; ",
      a2 ? "on Ascend910B" : "with comm_alg hierarchy",
      " it is needed: what the dispatch returned as expand_scales");
  one_of("expand_scales", *call.expand_scales, {at::kFloat});
  shape("expand_scales", *call.expand_scales, {call.expand_x.size(0)});
}

// Arguments of the versions.
struct CombineSettings : MoeSettings {
  int64_t out_dtype, group_list_type;
  FIELDS(group_ep, ep_world_size, ep_rank_id, moe_expert_num, group_tp, tp_world_size, tp_rank_id,
      shard_type, shared_num, shared_rank_num, global_bs, out_dtype, quant_mode, group_list_type)
};
struct NormInputs : CombineInputs {
  Tensor residual_x, gamma;
  FIELDS(expand_x, expert_ids, info, counts, expert_scales, residual_x, gamma, tp_send_counts,
      x_active_mask, activation_scale, weight_scale, group_list, expand_scales)
};
struct NormResults {
  Tensor y, rstd, x;
  FIELDS(y, rstd, x)
};
struct Later {
  Opt<Tensor> shared_x, elastic_info, performance_info;
  Text algorithm;
  SpecialInputs inputs;
  SpecialExperts experts;
};

Combine checked(
    Version version, const CombineInputs& in, const CombineSettings& settings, const Later& later) {
  reserved("activation_scale", in.activation_scale);
  reserved("weight_scale", in.weight_scale);
  reserved("group_list", in.group_list);
  reserved("elastic_info", later.elastic_info);
  no_times(later.performance_info);
  Combine call{
      in, later.inputs, {version, settings, later.algorithm, later.experts}, later.shared_x};
  call.check_arguments();
  // Only the dispatch has A3's names of algorithms.
  if (is_chip("Ascend910_93"))
    one_of("comm_alg", later.algorithm, {std::string(), std::string("hierarchy")});
  require_emulated(settings.quant_mode == 0, "comm_quant_mode is ", settings.quant_mode,
      "; 0 is emulated: how communicated values are quantized is not documented");
  return call;
}

Computation combine(Version version, const CombineInputs& in, const CombineSettings& settings,
    const Tensor& out, const Later& later = {}) {
  const auto call = checked(version, in, settings, later);
  check_expand_scales(call);
  shape("out", out, {call.expert_ids.size(0), call.expand_x.size(1)});
  call.at.on->claim(hccl::kCombine);
  return [=] { call.run([&](const Tensor& sum) { out.copy_(sum); }); };
}

// y is the normalized sum of the combined tokens and residual_x, x the sum.
Computation combine_norm(const NormInputs& in, const CombineSettings& settings, float eps,
    const NormResults& to, const Later& later) {
  const auto call = checked(Version::two, in, settings, later);
  call.at.on->claim(hccl::kCombine);
  COMPUTE {
    call.run([&](const Tensor& combined) {
      const auto sum = combined.unsqueeze(1) + in.residual_x.to(at::kFloat);
      const auto scale = (sum.square().mean(-1, true) + eps).rsqrt();
      to.x.copy_(sum);
      to.rstd.copy_(scale);
      to.y.copy_(sum * scale * in.gamma.to(at::kFloat));
    });
  };
}

}  // namespace

CHECKED(aclnnMoeDistributeCombine, (CombineInputs in, CombineSettings settings, Tensor out),
    { return combine(Version::one, in, settings, out); })
CHECKED(aclnnMoeDistributeCombineV2,
    (CombineInputs in, Opt<Tensor> shared_x, CombineSettings settings, Text comm_alg, Tensor out),
    { return combine(Version::two, in, settings, out, {shared_x, {}, {}, comm_alg}); })
CHECKED(aclnnMoeDistributeCombineV4,
    (CombineInputs in, Opt<Tensor> shared_x, Opt<Tensor> elastic_info, SpecialInputs inputs,
        Opt<Tensor> performance_info, CombineSettings settings, Text comm_alg,
        SpecialExperts experts, Tensor out),
    {
      return combine(Version::two, in, settings, out,
          {shared_x, elastic_info, performance_info, comm_alg, inputs, experts});
    })
CHECKED(aclnnMoeDistributeCombineV3,
    (CombineInputs in, Opt<Tensor> shared_x, Opt<Tensor> elastic_info, SpecialInputs inputs,
        CombineSettings settings, Text comm_alg, SpecialExperts experts, Tensor out),
    {
      return body_aclnnMoeDistributeCombineV4(
          in, shared_x, elastic_info, inputs, {}, settings, comm_alg, experts, out);
    })
CHECKED(aclnnMoeDistributeCombineAddRmsNorm,
    (NormInputs in, Opt<Tensor> shared_x, CombineSettings settings, Text comm_alg, float eps,
        NormResults to),
    { return combine_norm(in, settings, eps, to, {shared_x, {}, {}, comm_alg}); })
CHECKED(aclnnMoeDistributeCombineAddRmsNormV2,
    (NormInputs in, Opt<Tensor> shared_x, Opt<Tensor> elastic_info, SpecialInputs inputs,
        CombineSettings settings, Text comm_alg, float eps, SpecialExperts experts, NormResults to),
    {
      return combine_norm(
          in, settings, eps, to, {shared_x, elastic_info, {}, comm_alg, inputs, experts});
    })
