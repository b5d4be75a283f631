// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// MoE gating, and ordering of tokens by expert. Semantics and limits: torch_npu's documentation of
// npu_moe_gating_top_k(_softmax), npu_moe_init_routing(_v2) and npu_moe_compute_expert_tokens
// (torch_npu/_op_plugin_docs.py, BSD), its shape functions, and op-plugin's tests.
#include <numeric>

#include "ops/quantization/mx_groups.h"
#include "ops/quantization/quantized.h"
#include "ops/rows/rows.h"

using namespace emu;

namespace {

void check_softmax_arguments(const Tensor& x, const Opt<Tensor>& finished, int64_t k) {
  rule("moe_gating_softmax.k-of-experts", [&] { within("k", k, int64_t{1}, x.size(-1)); });
  if (finished)
    rule("moe_gating_softmax.finished-shape",
        [&] { shape("finished", *finished, x.sizes().slice(0, x.dim() - 1)); });
}

// Inactive rows get the number of experts as index.
void store_experts(
    const Tensor& experts, const Opt<Tensor>& finished, int64_t count, const Tensor& out) {
  out.copy_(finished ? experts.masked_fill(finished->unsqueeze(-1), count) : experts);
}

struct Gate {
  int64_t k, k_group, group_count, group_mode, renorm, kind;
  bool keep;
  double factor, eps;
  Tensor y, expert_idx, normed_out;
  FIELDS(k, k_group, group_count, group_mode, renorm, kind, keep, factor, eps, y, expert_idx,
      normed_out)

  void check_arguments(const Tensor& x) const {
    const int64_t experts = x.size(1);
    rule("moe_gating.groups", [&] {
      require(group_count > 0 && experts % group_count == 0, "group_count is ", group_count, "; ",
          experts, " experts must divide into that many groups");
      require(group_count == 1 || experts / group_count > 2, "a group has ", experts / group_count,
          " experts; more than 2 are needed");
      require((experts / group_count + 31) / 32 * 32 * group_count <= 2048, group_count,
          " groups of ", experts / group_count,
          " experts, each group padded to a multiple of 32, exceed 2048");
      within("k_group", k_group, int64_t{1}, group_count);
    });
    rule("moe_gating.k", [&] { within("k", k, int64_t{1}, experts / group_count * k_group); });
  }

  Tensor normed(const Tensor& x) const {
    return kind == 1 ? at::sigmoid(x.to(at::kFloat)) : at::softmax(x.to(at::kFloat), -1);
  }

  Tensor choose(const Tensor& scores) const {
    if (group_count == 1 || k_group == group_count) return top_of_rows(scores, k);
    const auto groups = scores.unflatten(-1, {group_count, -1});
    const auto group_scores =
        group_mode == 0 ? groups.amax(-1) : std::get<0>(groups.topk(2, -1)).sum(-1);
    const auto kept = at::zeros(group_scores.sizes(), at::kBool)
                          .scatter_(-1, top_of_rows(group_scores, k_group), true);
    return top_of_rows(
        groups
            .masked_fill(kept.logical_not().unsqueeze(-1), -std::numeric_limits<float>::infinity())
            .flatten(-2),
        k);
  }

  // `choose`: the experts, by the scores of all.
  template <class Choose> Computation computation(const Tensor& x, Choose choose) const {
    check_arguments(x);
    return [=, gate = *this] {
      const auto scores = gate.normed(x);
      const auto experts = choose(scores);
      auto weights = scores.gather(-1, experts);
      if (gate.kind == 1) weights = weights / (weights.sum(-1, true) + gate.eps);
      gate.y.copy_(weights * gate.factor);
      gate.expert_idx.copy_(experts);
      if (gate.keep) gate.normed_out.copy_(scores);
    };
  }
};

}  // namespace

CHECKED(aclnnMoeGatingTopKSoftmax,
    (Tensor x, Opt<Tensor> finished, int64_t k, Tensor y, Tensor expert_idx, Tensor row_idx), {
      check_softmax_arguments(x, finished, k);
      COMPUTE {
        const auto scores = at::softmax(x.to(at::kFloat), -1);
        const auto experts = top_of_rows(scores, k);
        y.copy_(scores.gather(-1, experts));
        store_experts(experts, finished, x.size(-1), expert_idx);
        const int64_t rows = x.numel() / x.size(-1);
        row_idx.copy_(at::arange(rows * k).view({k, rows}).t().reshape(row_idx.sizes()));
      };
    })

CHECKED(aclnnMoeGatingTopKSoftmaxV2,
    (Tensor x, Opt<Tensor> finished, int64_t k, int64_t renorm, bool keep, Tensor y,
        Tensor expert_idx, Opt<Tensor> softmax_out),
    {
      check_softmax_arguments(x, finished, k);
      COMPUTE {
        const auto fp32 = x.to(at::kFloat);
        const auto scores = renorm ? fp32 : at::softmax(fp32, -1);
        const auto experts = top_of_rows(scores, k);
        const auto chosen = scores.gather(-1, experts);
        y.copy_(renorm ? at::softmax(chosen, -1) : chosen);
        store_experts(experts, finished, x.size(-1), expert_idx);
        if (keep && !renorm && softmax_out) softmax_out->copy_(scores);
      };
    })

CHECKED(aclnnMoeGatingTopK, (Tensor x, Opt<Tensor> bias, Gate gate), {
  return gate.computation(x, [=](const Tensor& scores) {
    return gate.choose(bias ? scores + bias->to(at::kFloat) : scores);
  });
})

// Hash layers: experts from a table by token id.
CHECKED(aclnnMoeGatingTopKV2, (Tensor x, Opt<Tensor> bias, Tensor ids, Tensor table, Gate gate), {
  return gate.computation(
      x, [=](const Tensor&) { return table.index_select(0, ids.to(at::kLong)).to(at::kLong); });
})

CHECKED(aclnnMoeGatingTopKBackward,
    (Tensor normed, Tensor grad, Tensor expert_idx, int64_t, int64_t kind, double factor,
        double eps, Tensor out),
    {
      COMPUTE {
        const auto experts = expert_idx.to(at::kLong);
        const auto chosen = normed.gather(1, experts), total = chosen.sum(-1, true) + eps,
                   fp32 = grad.to(at::kFloat) * factor;
        const auto to_chosen =
            (fp32 - (fp32 * chosen).sum(-1, true) / total) / total * chosen * (1 - chosen);
        out.copy_(at::zeros_like(normed).scatter_(1, experts, to_chosen));
      };
    })

CHECKED(aclnnMoeInitRouting,
    (Tensor x, Tensor row_idx, Tensor expert_idx, int64_t active, Tensor expanded_x,
        Tensor expanded_row_idx, Tensor expanded_expert_idx),
    {
      require(x.numel() < (1 << 24) || x.size(0) < (1 << 24), "x is too large: ", x.sizes());
      COMPUTE {
        const auto [experts, order] = at::sort(expert_idx.reshape({-1}), true, 0, false);
        expanded_expert_idx.copy_(experts);
        const auto rows = row_idx.reshape({-1}).to(at::kLong).index_select(0, order);
        expanded_row_idx.scatter_(0, rows, at::arange(rows.numel(), at::kInt));
        expanded_x.copy_(
            x.index_select(0, rows.narrow(0, 0, expanded_x.size(0)).remainder(x.size(0))));
      };
    })

namespace {

// Of a byte each; ATen moves no values of these dtypes.
Tensor as_bytes(const Tensor& x) { return format_of(x.scalar_type()) ? x.view(at::kByte) : x; }

// Modes of npu_moe_init_routing_v2 on Ascend950, which store float8, HiF8 and float4.
void quantize_routed(const Tensor& rows, int64_t mode, const Opt<Tensor>& scale, const Tensor& out,
    const Opt<Tensor>& scale_out) {
  if (mode == 6 || mode == 7) {
    const auto values = rows.to(at::kFloat);
    encode(mode == 7 ? values * *scale : values, out, formats::Rounding::round, true);
  } else if (mode == 8) {
    quantize_along(rows.to(at::kFloat), {-1}, 0, out, scale_out->narrow(0, 0, rows.size(0)));
  } else {
    const auto pairs = scale_out->narrow(0, 0, rows.size(0)).view(at::kByte);
    mx_groups("rint", kGroup, mode == 9 ? 0 : 1, 0, 0)
        .run(rows, -1, out, pairs.dim() == 3 ? pairs : pairs.unflatten(-1, {-1, 2}));
  }
}

struct Routing {
  int64_t capacity, experts, padded, first, last, scatter, quant_mode, count_kind;
  bool count;

  // Sorts tokens by expert; rows of experts outside [first, last) are dropped.
  void run(const Tensor& x, const Tensor& expert_idx, const Opt<Tensor>& scale,
      const Opt<Tensor>& offset, const Tensor& expanded_x, const Tensor& row_idx,
      const Tensor& tokens, const Opt<Tensor>& scale_out) const {
    const int64_t k = expert_idx.size(1), all = expert_idx.numel();
    const auto keys = expert_idx.reshape({-1}).contiguous(),
               of_expert = at::zeros({last - first}, at::kLong);
    const auto* const expert = keys.const_data_ptr<int32_t>();
    auto* const counts = of_expert.mutable_data_ptr<int64_t>();
    const auto is_mine = [&](int64_t i) { return expert[i] >= first && expert[i] < last; };
    for (int64_t i = 0; i < all; ++i)
      if (is_mine(i)) ++counts[expert[i] - first];
    if (count) store_counts(of_expert, tokens);
    std::vector<int64_t> starts(last - first);
    std::exclusive_scan(counts, counts + (last - first), starts.begin(), int64_t{0});
    const int64_t present = std::accumulate(counts, counts + (last - first), int64_t{0});
    // Others' rows are behind: those of experts from `last` on, then those of experts before
    // `first`.
    std::vector<int64_t> order(all), next = starts;
    int64_t end = present;
    for (int64_t i = 0; i < all; ++i) order[is_mine(i) ? next[expert[i] - first]++ : end++] = i;
    std::stable_sort(order.begin() + present, order.end(), [&](int64_t a, int64_t b) {
      return std::pair(expert[a] < first, expert[a]) < std::pair(expert[b] < first, expert[b]);
    });

    std::vector<int64_t> to, from;  // rows of the output, and their indices in expert_idx
    const auto row_of = at::full({all}, -1, at::kInt);
    auto* const row = row_of.mutable_data_ptr<int32_t>();
    for (int64_t i = 0; i < present; ++i) {
      const int64_t place =
          padded ? expert[order[i]] * capacity + i - starts[expert[order[i]] - first] : i;
      const bool has_row =
          padded ? place < (expert[order[i]] + 1) * capacity : place < expanded_x.size(0);
      if (has_row) to.push_back(place), from.push_back(order[i]);
      if (has_row || !padded) row[order[i]] = place;
    }
    row_idx.copy_(scatter && !padded ? at::tensor(order, at::kLong) : row_of);
    if (padded) {
      expanded_x.zero_();
      if (scale_out) scale_out->zero_();
    }
    if (to.empty()) return;
    const auto places = at::tensor(to, at::kLong), sources = at::tensor(from, at::kLong),
               of_token = sources.floor_divide(k);
    const auto rows = as_bytes(x).index_select(0, of_token);
    if (quant_mode != -1 && is_low_precision(expanded_x))
      return quantize_routed(
          rows, quant_mode, scale, expanded_x.narrow(0, 0, places.numel()), scale_out);
    const auto out = as_bytes(expanded_x).view({-1, expanded_x.size(-1)});
    if (quant_mode == -1) {
      if (scale && scale_out && scale->dim() > 1) {
        as_bytes(*scale_out).index_copy_(0, places, as_bytes(*scale).index_select(0, of_token));
        out.narrow(0, 0, places.numel()).copy_(rows);
        return;
      }
      padded ? out.index_copy_(0, places, rows) : out.narrow(0, 0, places.numel()).copy_(rows);
      if (scale && scale_out)
        scale_out->view({-1}).index_copy_(
            0, places, scale->reshape({-1}).index_select(0, of_token));
      return;
    }
    auto values = rows.to(at::kFloat);
    auto rounded = at::empty({places.numel(), out.size(-1)}, out.options());
    if (quant_mode == 0) {
      store_rounded(values * scale->to(at::kFloat) + offset->to(at::kFloat), rounded, false);
    } else {
      if (scale)
        values = values * (scale->size(0) == 1
                                  ? *scale
                                  : scale->index_select(0, keys.index_select(0, sources) - first))
                              .to(at::kFloat);
      const auto steps = at::empty({places.numel()}, at::kFloat);
      quantize_rows(values, rounded, steps, quant_mode == 13);
      if (scale_out) scale_out->view({-1}).index_copy_(0, places, steps);
    }
    out.index_copy_(0, places, rounded);
  }

  void store_counts(const Tensor& of_expert, const Tensor& tokens) const {
    if (count_kind < 2) {
      tokens.copy_(count_kind == 0 ? of_expert.cumsum(0) : of_expert);
      return;
    }
    const auto used = at::nonzero(of_expert > 0).view(-1);
    tokens.zero_();
    tokens.narrow(0, 0, used.numel())
        .copy_(at::stack({used + first, of_expert.index_select(0, used)}, 1));
  }
};

}  // namespace

CHECKED(aclnnMoeInitRoutingV3,
    (Tensor x, Tensor expert_idx, Opt<Tensor> scale, Opt<Tensor> offset, int64_t active,
        int64_t capacity, int64_t experts, int64_t padded, int64_t count_kind, bool count,
        int64_t quant_mode, Ints range, int64_t scatter, Tensor expanded_x, Tensor row_idx,
        Tensor tokens, Opt<Tensor> scale_out),
    {
      rule("moe_init_routing_v2.expert-range",
          range.size() == 2 && range[0] >= 0 && range[0] < range[1] && range[1] <= experts,
          "active_expert_range is [", listed(range), "); it must lie within [0, ", experts, ")");
      if (padded)
        rule("moe_init_routing_v2.capacity",
            [&] { within("expert_capacity", capacity, int64_t{1}, x.size(0) - 1); });
      if (is_low_precision(expanded_x) && quant_mode != -1) {
        require_emulated(quant_mode <= 9 && quant_mode != 4 && quant_mode != 5, "quant_mode ",
            quant_mode, " is not emulated");
        // op-plugin's test cuts the largest magnitude of a float16 group off to bfloat16.
        require_emulated(quant_mode > 3 || x.scalar_type() != at::kHalf, "quant_mode ", quant_mode,
            " of float16 is not emulated");
        rule("moe_init_routing_v2.float-modes", !padded && scale.has_value() == (quant_mode == 7),
            "drop_pad_mode is ", padded, " and scale ", scale ? "given" : "None",
            "; with quant_mode ", quant_mode, " 0 and ", quant_mode == 7 ? "one value" : "None",
            " are allowed");
      } else if (scale && quant_mode > 0)
        rule("moe_init_routing_v2.dynamic-scale",
            scale->dim() == 2 && scale->size(1) == x.size(1) &&
                (scale->size(0) == 1 || scale->size(0) == range[1] - range[0]),
            "scale has shape ", scale->sizes(), "; allowed: [1, ", x.size(1), "] and [",
            range[1] - range[0], ", ", x.size(1), "]");
      const Routing routing{
          capacity, experts, padded, range[0], range[1], scatter, quant_mode, count_kind, count};
      COMPUTE {
        routing.run(x, expert_idx, scale, offset, expanded_x, row_idx, tokens, scale_out);
      };
    })

// Called by npu_moe_init_routing_v2 on Ascend310P; count flag: 1 cumulative, 2 counts.
CHECKED(aclnnMoeInitRoutingV2,
    (Tensor x, Tensor expert_idx, int64_t, int64_t capacity, int64_t experts, int64_t padded,
        int64_t count_flag, bool, Tensor expanded_x, Tensor row_idx, Opt<Tensor> tokens,
        Opt<Tensor>),
    {
      const Routing routing{
          capacity, experts, padded, 0, experts, 0, -1, count_flag == 1 ? 0 : 1, count_flag > 0};
      COMPUTE {
        routing.run(x, expert_idx, {}, {}, expanded_x, row_idx, tokens.value_or(Tensor()), {});
      };
    })

// npu_moe_init_routing_quant: quant_mode 0: static, 1: dynamic per row; counts: cumulative (1) or
// not (2) without padding, before the capacity limit with padding (op-plugin's
// MoeInitRoutingQuantKernelNpuOpApi.cpp).
CHECKED(aclnnMoeInitRoutingQuantV2,
    (Tensor x, Tensor expert_idx, Opt<Tensor> scale, Opt<Tensor> offset, int64_t, int64_t capacity,
        int64_t experts, int64_t padded, int64_t count_flag, bool before, int64_t quant_mode,
        Tensor expanded_x, Tensor row_idx, Opt<Tensor> tokens, Opt<Tensor> before_capacity,
        Opt<Tensor> scale_out),
    {
      if (padded)
        require(capacity > 0 && capacity <= x.size(0), "expert_capacity is ", capacity,
            "; allowed: 1 to ", x.size(0), ", the rows of x");
      const Routing routing{capacity, experts, padded, 0, experts, 0, quant_mode,
          count_flag == 1 ? 0 : 1, !padded && count_flag > 0};
      COMPUTE {
        routing.run(x, expert_idx, scale, offset, expanded_x, row_idx, tokens.value_or(Tensor()),
            scale_out);
        if (padded && before && before_capacity)
          before_capacity->copy_(at::bincount(expert_idx.reshape({-1}), {}, experts));
      };
    })

// End of each expert's rows.
CHECKED(aclnnMoeComputeExpertTokens, (Tensor sorted, int64_t experts, Tensor out), {
  COMPUTE {
    out.copy_(at::searchsorted(sorted, at::arange(experts, at::kInt), false, /*right=*/true));
  };
})

// Reorders rows from [rank][expert] to [expert][rank], with the index into the input for each
// output row.
CHECKED(aclnnMoeReRouting,
    (Tensor tokens, Tensor counts, Opt<Tensor> scales, int64_t count_type, int64_t idx_type,
        Tensor tokens_out, Tensor scales_out, Tensor idx_out, Tensor count_out),
    {
      COMPUTE {
        const auto counts64 = counts.to(at::kLong).contiguous();
        const auto flat = counts64.view(-1), starts = flat.cumsum(0) - flat;
        const auto length = counts64.t().reshape(-1),
                   start = starts.view(counts64.sizes()).t().reshape(-1);
        const int64_t rows = length.sum().item<int64_t>();
        require(rows <= tokens.size(0), "expert_token_num_per_rank counts ", rows,
            " tokens; there are ", tokens.size(0));
        const auto begins = length.cumsum(0) - length;
        const auto from = at::arange(rows) + (start - begins).repeat_interleave(length);
        tokens_out.narrow(0, 0, rows).copy_(tokens.index_select(0, from));
        if (scales) scales_out.narrow(0, 0, rows).copy_(scales->index_select(0, from));
        idx_out.narrow(0, 0, rows).copy_(from);
        count_out.copy_(counts64.sum(0));
      };
    })
