// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_moe_distribute_dispatch[_v2]; see moe_distribute.h.
//
// Received rows are ordered by local expert, source rank and token; ep_recv_counts has the end of
// the rows of each (local expert, source rank).
#include "ops/quantization/mx_groups.h"
#include "ops/quantization/quantized.h"
#include "moe_distribute.h"

using namespace emu;
using namespace emu::mc2;

namespace {

constexpr int64_t kTail = 16;  // bytes sent with a row: scale, expert weight, token and choice

struct DispatchInputs {
  Tensor x, expert_ids;
  Opt<Tensor> scales, x_active_mask, expert_scales;
  FIELDS(x, expert_ids, scales, x_active_mask, expert_scales)
};
struct DispatchSettings : MoeSettings {
  int64_t nums_type;
  FIELDS(group_ep, ep_world_size, ep_rank_id, moe_expert_num, group_tp, tp_world_size, tp_rank_id,
      shard_type, shared_num, shared_rank_num, quant_mode, global_bs, nums_type)
};
struct DispatchResults {
  Tensor expand_x, dynamic_scales, info, token_nums, counts, tp_counts, expand_scales;
  FIELDS(expand_x, dynamic_scales, info, token_nums, counts, tp_counts, expand_scales)
};

struct Dispatch : DispatchInputs, DispatchResults {
  Experts at;
  int64_t quant_mode, nums_type;

  bool words() const { return x.scalar_type() == at::kInt; }
  bool scaled() const { return words() || quant_mode == 2; }
  bool exponents() const { return quant_mode == 4; }
  // Bytes of a row's shared exponents, which are sent behind its values.
  int64_t exponent_bytes() const { return exponents() ? dynamic_scales.size(1) : 0; }

  void check_arguments() const {
    const bool a2 = is_chip("Ascend910B");
    one_of("x", x,
        a2 && at.version == Version::two ? DTypes{at::kHalf, at::kBFloat16, at::kInt} : kHalves);
    const int64_t hidden = x.size(1), choices = expert_ids.size(1);
    at.check_tokens(expert_ids, x_active_mask, hidden, words());
    at.check_buffer(expert_ids.size(0), choices, hidden, x.element_size());
    // 1, 3 and 4 (static, per group, MX) are of Ascend950; of these MX is emulated.
    const bool has_mx = is_chip("Ascend950") && at.version == Version::two;
    using Modes = std::initializer_list<int64_t>;
    one_of("quant_mode", quant_mode, words() ? Modes{0} : has_mx ? Modes{0, 2, 4} : Modes{0, 2});
    if (words()) {
      one_of("comm_alg, with an int32 x,", at.algorithm, {std::string("fullmesh")});
      require(!absent(scales), "scales is None; with an int32 x it is needed");
      shape("scales", *scales, {x.size(0)});
    } else if (quant_mode != 2) {
      require(absent(scales), "scales is given; with quant_mode ", quant_mode, ", None is allowed");
    } else if (!absent(scales)) {
      shape("scales", *scales, {at.shared + at.experts, hidden});
    }
    if (!absent(expert_scales)) {
      require(a2 || at.algorithm == "hierarchy", "expert_scales is given; on ", chip().name,
          " None is allowed, except with comm_alg hierarchy");
    } else {
      require(at.algorithm != "hierarchy",
          "expert_scales is None; with comm_alg hierarchy it is needed");
    }
    if (exponents()) {
      one_of("y_dtype, with quant_mode 4,", expand_x, {at::kFloat8_e4m3fn, at::kFloat8_e5m2});
      one_of("dynamic_scales", dynamic_scales, {at::kFloat8_e8m0fnu});
      shape("dynamic_scales", dynamic_scales,
          {expand_x.size(0), (hidden + 2 * kGroup - 1) / (2 * kGroup) * 2});
    } else {
      require(expand_x.scalar_type() == (quant_mode ? at::kChar : x.scalar_type()),
          "the dtype of expand_x is ", expand_x.scalar_type(),
          "; without y_dtype it follows from x and quant_mode");
    }
    const int64_t most = at.most_rows(choices);
    require(expand_x.dim() == 2 && expand_x.size(1) == hidden && expand_x.size(0) >= most,
        "expand_x has shape ", expand_x.sizes(), "; it must be at least [", most, ", ", hidden,
        "]");
  }

  // Records to send, one per slot.
  Tensor records(const std::vector<std::vector<Slots>>& routes) const {
    std::vector<int64_t> tokens, choices, experts;
    int64_t first = 0;  // first expert of the rank
    for (int64_t to = 0; to < at.ranks(); ++to) {
      for (int64_t local = 0; local < at.local(to); ++local) {
        for (const auto& slot : routes[to][local]) {
          tokens.push_back(slot.token);
          choices.push_back(slot.choice);
          // The rows of scales: shared experts first.
          experts.push_back(
              to < at.shared_ranks ? slot.choice - expert_ids.size(1) : at.shared + first + local);
        }
      }
      if (to >= at.shared_ranks) first += at.local(to);
    }
    const auto token = from_ints(tokens), choice = from_ints(choices), expert = from_ints(experts);
    const int64_t rows = token.numel();
    auto values = x.index_select(0, token);
    auto scale = at::zeros({rows}, at::kFloat);
    if (words()) {
      scale = scales->index_select(0, token);
    } else if (quant_mode == 2) {
      auto fp32 = values.to(at::kFloat);
      if (!absent(scales)) fp32 = fp32 * scales->index_select(0, expert);
      const auto most = fp32.abs().amax(1, true), factor = 127.0 / most;
      values = at::empty(fp32.sizes(), at::kChar);
      store_rounded(at::where(most > 0, fp32 * factor, at::zeros_like(fp32)), values, false);
      scale = (1.0 / factor).squeeze(1);
    }
    auto codes = at::empty({rows, exponent_bytes()}, at::kByte);
    if (exponents()) {
      const auto quotients = at::empty({rows, x.size(1)}, expand_x.options());
      mx_groups("rint", kGroup, 0, 0, 0).run(values, -1, quotients, codes.unflatten(-1, {-1, 2}));
      values = quotients;
    }
    auto weight = at::zeros({rows}, at::kFloat);
    if (!absent(expert_scales)) {
      const auto last = choice.clamp_max(expert_ids.size(1) - 1);
      weight = expert_scales->index({token, last});
    }
    const auto bytes = [](const Tensor& column) {
      return column.unsqueeze(1).contiguous().view(at::kByte);
    };
    return at::concat({values.contiguous().view(at::kByte), codes, bytes(scale), bytes(weight),
                          bytes(token.to(at::kInt)), bytes(choice.to(at::kInt))},
        1);
  }

  void run() const {
    const auto call = hccl::fused_header(hccl::kDispatch, x.scalar_type(), x.size(1));
    hccl::fused(*at.on, call, [&] {
      at.check_same_on_all_ranks(call, expert_ids.size(1),
          {{"quant_mode", quant_mode}, {"whether expert_scales is given", !absent(expert_scales)}});
      const int64_t ranks = at.ranks(), own = at.local(at.on->rank);
      const auto routes = at.route(expert_ids, x_active_mask);
      std::vector<Tensor> sent, received;
      for (int64_t to = 0; to < ranks; ++to) {
        std::vector<int64_t> sizes;
        for (const auto& slots : routes[to]) sizes.push_back(static_cast<int64_t>(slots.size()));
        sent.push_back(from_ints(sizes));
        received.push_back(at::empty({own}, at::kLong));
      }
      hccl::exchange(*at.on, call, sent, received);
      const auto table = at::stack(received);  // [source, local expert]
      const auto all = records(routes);
      const int64_t width = all.size(1);
      std::vector<Tensor> out, in;
      int64_t first = 0;
      for (int64_t peer = 0; peer < ranks; ++peer) {
        const int64_t rows = sent[peer].sum().item<int64_t>();
        out.push_back(all.narrow(0, first, rows));
        first += rows;
        in.push_back(at::empty({received[peer].sum().item<int64_t>(), width}, at::kByte));
      }
      hccl::exchange(*at.on, call, out, in);
      copy_if_given(routes, table, in);
    });
  }

  void copy_if_given(const std::vector<std::vector<Slots>>& routes, const Tensor& table,
      const std::vector<Tensor>& in) const {
    const int64_t ranks = at.ranks(), own = at.local(at.on->rank), tail = in[0].size(1) - kTail,
                  width = tail - exponent_bytes();
    std::vector<Tensor> pieces;
    std::vector<int64_t> sources, used(ranks);
    for (int64_t local = 0; local < own; ++local) {
      for (int64_t from = 0; from < ranks; ++from) {
        const int64_t rows = table[from][local].item<int64_t>();
        pieces.push_back(in[from].narrow(0, used[from], rows));
        used[from] += rows;
        sources.insert(sources.end(), rows, from);
      }
    }
    const auto all = at::concat(pieces);
    const int64_t rows = all.size(0);
    require(rows <= expand_x.size(0), "this rank receives ", rows, " rows; expand_x has ",
        expand_x.size(0));
    const auto column = [&](int64_t which, at::ScalarType type) {
      return all.narrow(1, tail + 4 * which, 4).contiguous().view(type).view({rows});
    };
    expand_x.narrow(0, 0, rows)
        .copy_(all.narrow(1, 0, width).contiguous().view(expand_x.scalar_type()));
    if (exponents())
      dynamic_scales.view(at::kByte)
          .narrow(0, 0, rows)
          .copy_(all.narrow(1, width, exponent_bytes()));
    if (scaled()) dynamic_scales.view({-1}).narrow(0, 0, rows).copy_(column(0, at::kFloat));
    if (!absent(expert_scales)) expand_scales.narrow(0, 0, rows).copy_(column(1, at::kFloat));
    const auto by_expert = table.sum(0);
    token_nums.copy_(nums_type ? by_expert : by_expert.cumsum(0));
    const auto ends = table.t().reshape({-1}).cumsum(0);
    counts.narrow(0, 0, ends.numel()).copy_(ends);
    counts.narrow(0, ends.numel(), counts.numel() - ends.numel())
        .zero_();  // the rest is for A2's hierarchical algorithm
    if (tp_counts.numel()) tp_counts.fill_(rows);
    if (at.version == Version::two) {  // source of each row
      const auto origin =
          at::stack({from_ints(sources).to(at::kInt), column(2, at::kInt), column(3, at::kInt)}, 1);
      info.narrow(0, 0, 3 * rows).copy_(origin.reshape({-1}));
      return;
    }
    std::vector<int64_t> places(
        expert_ids.numel());  // index of each choice among those sent to the same expert
    for (const auto& to : routes) {
      for (const auto& slots : to) {
        for (size_t i = 0; i < slots.size(); ++i)
          if (slots[i].choice < expert_ids.size(1))
            places[slots[i].token * expert_ids.size(1) + slots[i].choice] = static_cast<int64_t>(i);
      }
    }
    info.copy_(from_ints(places));
  }
};

Computation dispatch(Version version, const DispatchInputs& in, const DispatchSettings& settings,
    const DispatchResults& to, const Text& algorithm = "", const SpecialExperts& special = {}) {
  const Dispatch call{
      in, to, {version, settings, algorithm, special}, settings.quant_mode, settings.nums_type};
  call.check_arguments();
  call.at.on->claim(hccl::kDispatch);
  return [=] { call.run(); };
}

}  // namespace

CHECKED(aclnnMoeDistributeDispatch,
    (DispatchInputs in, DispatchSettings settings, DispatchResults to),
    { return dispatch(Version::one, in, settings, to); })
CHECKED(aclnnMoeDistributeDispatchV2,
    (DispatchInputs in, DispatchSettings settings, Text comm_alg, DispatchResults to),
    { return dispatch(Version::two, in, settings, to, comm_alg); })
CHECKED(aclnnMoeDistributeDispatchV4,
    (DispatchInputs in, Opt<Tensor> elastic_info, Opt<Tensor> performance_info,
        DispatchSettings settings, Text comm_alg, SpecialExperts special, DispatchResults to),
    {
      reserved("elastic_info", elastic_info);
      no_times(performance_info);
      return dispatch(Version::two, in, settings, to, comm_alg, special);
    })
CHECKED(aclnnMoeDistributeDispatchV3,
    (DispatchInputs in, Opt<Tensor> elastic_info, DispatchSettings settings, Text comm_alg,
        SpecialExperts special, DispatchResults to),
    {
      return body_aclnnMoeDistributeDispatchV4(
          in, elastic_info, {}, settings, comm_alg, special, to);
    })
