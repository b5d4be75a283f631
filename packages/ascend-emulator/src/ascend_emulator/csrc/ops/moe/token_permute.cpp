// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Token permutation by expert and its inverse, with gradients. Semantics and limits: torch_npu's
// documentation of npu_moe_token_permute, npu_moe_token_unpermute,
// npu_moe_token_permute_with_routing_map and npu_moe_finalize_routing
// (torch_npu/_op_plugin_docs.py, BSD), and op-plugin's tests.
#include "ops/quantization/quantized.h"
#include "ops/rows/rows.h"

using namespace emu;

namespace {

// rows[index]; zeros for invalid indices (dropped tokens).
Tensor rows_or_zeros(const Tensor& rows, const Tensor& index) {
  const auto positions = index.reshape({-1}).to(at::kLong);
  const auto known = at::logical_and(positions >= 0, positions < rows.size(0));
  if (rows.size(0) == 0) return at::zeros({positions.numel(), rows.size(1)}, at::kFloat);
  return rows.to(at::kFloat)
      .index_select(0, positions.where(known, at::zeros_like(positions)))
      .masked_fill(known.logical_not().unsqueeze(1), 0);  // also where the row is NaN
}

// Throws unless all indices are within [least, end).
void check_rows(const char* name, const Tensor& index, int64_t least, int64_t end) {
  if (!index.numel()) return;
  const auto [low, high] = at::aminmax(index);
  const int64_t from = low.item<int64_t>(), to = high.item<int64_t>();
  require(from >= least && to < end, name, " has values from ", from, " to ", to,
      "; allowed: ", least, " to ", end - 1);
}

}  // namespace

CHECKED(aclnnMoeTokenPermute,
    (Tensor tokens, Tensor indices, int64_t, bool padded, Tensor permuted, Tensor sorted_indices), {
      COMPUTE {
        const int64_t k = indices.dim() == 1 ? 1 : indices.size(1);
        const auto order = at::argsort(indices.reshape({-1}), true, 0, false);
        permuted.copy_(
            tokens.index_select(0, order.narrow(0, 0, permuted.size(0)).floor_divide(k)));
        sorted_indices.scatter_(0, order, at::arange(order.numel(), at::kInt));
      };
    })

CHECKED(aclnnMoeTokenPermuteGrad,
    (Tensor grad, Tensor sorted_indices, int64_t k, bool padded, Tensor out), {
      COMPUTE {
        out.copy_(rows_or_zeros(grad, sorted_indices).view({-1, k, grad.size(1)}).sum(1));
      };
    })

CHECKED(aclnnMoeTokenUnpermute,
    (Tensor permuted, Tensor sorted_indices, Opt<Tensor> probs, bool padded, Opt<Ints>, Tensor out),
    {
      COMPUTE {
        const int64_t k = probs ? probs->size(1) : 1;
        // "取值范围是[0, tokens_num * topK_num - 1]，且没有重复索引"; indices behind the last row
        // are dropped tokens'. Only the gradient requires that indices are unique: vllm-ascend, on
        // NPUs, gives all rows of other ranks' experts the index 1.
        rule("moe_token_unpermute.indices-values",
            [&] { check_rows("sorted_indices", sorted_indices, 0, sorted_indices.numel()); });
        const auto places = sorted_indices.contiguous();
        const auto rows = permuted.contiguous(),
                   weights = probs ? probs->to(at::kFloat).contiguous() : Tensor();
        const auto sums = at::zeros(out.sizes(), at::kFloat);
        add_weighted_rows(rows, places, weights, k, sums);
        out.copy_(sums);
      };
    })

CHECKED(aclnnMoeTokenUnpermuteGrad,
    (Opt<Tensor> permuted, Tensor grad, Tensor sorted_indices, Opt<Tensor> probs, bool padded,
        Opt<Ints>, Tensor out, Opt<Tensor> probs_out),
    {
      COMPUTE {
        const int64_t k = probs ? probs->size(1) : 1;
        require(std::get<0>(at::_unique(sorted_indices)).numel() == sorted_indices.numel(),
            "sorted_indices has the same index twice; each must be there once");
        auto spread = grad.to(at::kFloat).unsqueeze(1);
        if (probs) spread = spread * probs->to(at::kFloat).unsqueeze(-1);
        const auto index = sorted_indices.to(at::kLong);
        const auto kept = at::nonzero(index < out.size(0)).view(-1);
        out.copy_(at::zeros(out.sizes(), at::kFloat)
                .index_copy_(0, index.index_select(0, kept),
                    spread.reshape({-1, grad.size(1)}).index_select(0, kept)));
        if (probs && probs_out)
          probs_out->copy_((rows_or_zeros(*permuted, index).view({-1, k, grad.size(1)}) *
                            grad.to(at::kFloat).unsqueeze(1))
                  .sum(-1));
      };
    })

namespace {
// The first version takes only skip1.
void both_or_second(const Opt<Tensor>& skip1, const Opt<Tensor>& skip2) {
  require(skip2 || !skip1, "skip1 is given without skip2");
}

// out = skip1 + skip2 + sum over k of scales (rows[place] + bias[expert]). Rows are indexed by [k,
// tokens] in drop_pad_mode 0 and 1, [tokens, k] in 2 and 3.
Computation finalize_routing(const Tensor& rows, const Tensor& places, const Opt<Tensor>& skip1,
    const Opt<Tensor>& skip2, const Opt<Tensor>& bias, const Opt<Tensor>& scales,
    const Opt<Tensor>& experts, int64_t mode, int64_t k_given, const Tensor& out) {
  rule("moe_finalize_routing.rows-rank",
      [&] { rank("expanded_permuted_rows", rows, mode % 2 ? 3 : 2); });
  const int64_t k = scales ? scales->size(1) : std::max<int64_t>(k_given, 1);
  require(places.numel() == out.size(0) * k, "expanded_src_to_dst_row has ", places.numel(),
      " elements; ", out.size(0), " rows by ", k, " are needed");
  COMPUTE {
    const int64_t tokens = out.size(0), columns = out.size(1);
    // Dropped rows are -1 "drop_pad_mode参数为1或3时" only.
    rule("moe_finalize_routing.index-values", [&] {
      check_rows("expanded_src_to_dst_row", places, mode % 2 ? -1 : 0,
          mode % 2 ? rows.size(0) * rows.size(1) : places.numel());
    });
    const auto index = mode < 2 ? places.view({k, tokens}).t() : places.view({tokens, k});
    auto values = rows_or_zeros(rows.reshape({-1, columns}), index).view({tokens, k, columns});
    if (bias)
      values = values + bias->to(at::kFloat)
                            .index_select(0, experts->reshape({-1}).to(at::kLong))
                            .view(values.sizes());
    if (scales) values = values * scales->to(at::kFloat).unsqueeze(-1);
    auto total = values.sum(1);
    if (skip1) total = total + skip1->to(at::kFloat);
    if (skip2) total = total + skip2->to(at::kFloat);
    out.copy_(total);
  };
}
}  // namespace

CHECKED(aclnnMoeFinalizeRouting,
    (Tensor rows, Tensor skip1, Opt<Tensor> skip2, Opt<Tensor> bias, Opt<Tensor> scales,
        Tensor places, Opt<Tensor> experts, Tensor out),
    { return finalize_routing(rows, places, skip1, skip2, bias, scales, experts, 0, 1, out); })
CHECKED(aclnnMoeFinalizeRoutingV2,
    (Tensor rows, Tensor places, Opt<Tensor> skip1, Opt<Tensor> skip2, Opt<Tensor> bias,
        Opt<Tensor> scales, Opt<Tensor> experts, int64_t mode, Tensor out),
    {
      both_or_second(skip1, skip2);
      return finalize_routing(rows, places, skip1, skip2, bias, scales, experts, mode, 1, out);
    })
CHECKED(aclnnMoeFinalizeRoutingV4,
    (Tensor rows, Tensor places, Opt<Tensor> skip1, Opt<Tensor> skip2, Opt<Tensor> bias,
        Opt<Tensor> scales, Opt<Tensor> experts, Opt<Tensor>, Opt<Tensor>, Opt<Tensor>, Opt<Tensor>,
        int64_t mode, Opt<Ints>, Opt<Ints>, Opt<Ints>, int64_t k_given, Tensor out),
    {
      both_or_second(skip1, skip2);
      return finalize_routing(
          rows, places, skip1, skip2, bias, scales, experts, mode, k_given, out);
    })

namespace {

// Token of each row, ordered by expert, from a [tokens, experts] map. Padded: the first `capacity`
// tokens of each expert, mapped tokens first.
Tensor tokens_by_expert(const Tensor& map, bool padded, int64_t rows) {
  const auto by_expert = map.to(at::kBool).t();
  if (!padded) return at::nonzero(by_expert).select(1, 1).narrow(0, 0, rows);
  return at::argsort(by_expert.to(at::kByte), true, -1, true)
      .narrow(1, 0, rows / map.size(1))
      .reshape(-1);
}

}  // namespace

CHECKED(aclnnMoeTokenPermuteWithRoutingMap,
    (Tensor tokens, Tensor map, Opt<Tensor> probs, int64_t, bool padded, Tensor out,
        Opt<Tensor> probs_out, Tensor sorted_indices),
    {
      COMPUTE {
        const int64_t rows = out.size(0);
        const auto from = tokens_by_expert(map, padded, rows);
        out.copy_(tokens.index_select(0, from));
        sorted_indices.copy_(padded ? from : at::argsort(from, true, 0, false));
        if (!probs || !probs_out) return;
        const auto by_expert = probs->t();
        probs_out->copy_(padded
                             ? by_expert.gather(1, from.view({map.size(1), -1})).reshape(-1)
                             : by_expert.masked_select(map.to(at::kBool).t()).narrow(0, 0, rows));
      };
    })

CHECKED(aclnnMoeTokenPermuteWithRoutingMapGrad,
    (Tensor grad, Opt<Tensor> probs_grad, Tensor sorted_indices, Tensor map, int64_t experts,
        int64_t tokens, bool padded, Tensor out, Opt<Tensor> probs_out),
    {
      COMPUTE {
        const auto index = sorted_indices.to(at::kLong);
        const auto from = padded ? index : tokens_by_expert(map, false, index.numel());
        out.copy_(
            at::zeros({tokens, grad.size(1)}, at::kFloat).index_add_(0, from, grad.to(at::kFloat)));
        if (!probs_grad || !probs_out) return;
        auto by_expert = at::zeros({experts, tokens}, probs_grad->options());
        if (padded)
          by_expert.scatter_(1, from.view({experts, -1}), probs_grad->view({experts, -1}));
        else by_expert.masked_scatter_(map.to(at::kBool).t(), *probs_grad);
        probs_out->copy_(by_expert.t());
      };
    })

namespace {

// Slots of a routing map's tokens: the row of the permuted tokens, the token, and the flat index of
// its probability in [tokens, experts]. Not padded: in the order of the tokens; padded: of the
// rows' tokens.
struct MapSlots {
  Tensor row, token, place;
};
MapSlots padded_slots(const Tensor& map, const Tensor& rows, const Tensor& tokens) {
  const auto row = rows.to(at::kLong), token = tokens.to(at::kLong);
  return {row, token, token * map.size(1) + row.floor_divide(row.numel() / map.size(1))};
}
MapSlots slots_of(const Tensor& map, const Tensor& sorted_indices, bool padded) {
  const int64_t tokens = map.size(0), experts = map.size(1), rows = sorted_indices.numel();
  const auto index = sorted_indices.to(at::kLong);
  if (padded) {
    check_rows("sorted_indices", sorted_indices, 0, tokens);
    const auto [token, row] = at::sort(index, true, 0, false);
    return padded_slots(map, row, token);
  }
  check_rows("sorted_indices", sorted_indices, 0, rows);
  const auto place = at::nonzero(map.to(at::kBool).reshape({-1})).view(-1);
  require(place.numel() == rows, "routing_map has ", place.numel(), " entries and sorted_indices ",
      rows);
  return {index, place.floor_divide(experts), place};
}

void check_map(
    const Opt<Tensor>& map, const Tensor& index, bool padded, const Ints& restore, int64_t hidden) {
  require(map.has_value(), "routing_map is None; it is needed");
  require(restore == Ints{map->size(0), hidden}, "restore_shape is ", at::IntArrayRef(restore),
      "; it must be [", map->size(0), ", ", hidden, "]");
  if (padded)
    multiple("the rows of permuted_tokens, with drop_and_pad,", index.numel(), map->size(1));
}

}  // namespace

// What op-plugin's test_npu_moe_token_unpermute_with_routing_map.py expects. out_index and
// permuted_token_id are for the gradient.
CHECKED(aclnnMoeTokenUnpermuteWithRoutingMap,
    (Tensor permuted, Tensor sorted_indices, Opt<Tensor> map, Opt<Tensor> probs, bool padded,
        Ints restore, Tensor out, Tensor out_index, Tensor token_id, Opt<Tensor> permuted_probs),
    {
      check_map(map, sorted_indices, padded, restore, permuted.size(1));
      shape("permuted_tokens", permuted, {sorted_indices.numel(), permuted.size(1)});
      shape("out", out, restore);
      COMPUTE {
        const auto [row, token, place] = slots_of(*map, sorted_indices, padded);
        auto rows = permuted.to(at::kFloat).index_select(0, row);
        if (probs) {
          const auto weights = probs->reshape({-1}).index_select(0, place);
          rows = rows * weights.to(at::kFloat).unsqueeze(1);
          // With padding in the order of the rows.
          if (permuted_probs)
            permuted_probs->copy_(
                padded ? at::empty_like(weights).index_copy_(0, row, weights) : weights);
        }
        out.copy_(at::zeros(out.sizes(), at::kFloat).index_add_(0, token, rows));
        out_index.copy_(row);
        token_id.copy_(token);
      };
    })
CHECKED(aclnnMoeTokenUnpermuteWithRoutingMapGrad,
    (Tensor grad, Tensor out_index, Tensor token_id, Opt<Tensor> map, Opt<Tensor> permuted,
        Opt<Tensor> probs, bool padded, Ints restore, Tensor out, Opt<Tensor> probs_out),
    {
      shape("unpermuted_tokens_grad", grad, restore);
      check_map(map, out_index, padded, restore, grad.size(1));
      require(!probs || permuted, "permuted_tokens is needed with probs");
      shape("permuted_tokens_grad", out, {out_index.numel(), grad.size(1)});
      COMPUTE {
        const auto [row, token, place] =
            padded ? padded_slots(*map, out_index, token_id) : slots_of(*map, out_index, false);
        const auto rows = grad.to(at::kFloat).index_select(0, token);
        const auto weighted =
            probs ? rows * probs->reshape({-1}).index_select(0, place).to(at::kFloat).unsqueeze(1)
                  : rows;
        out.copy_(at::empty(out.sizes(), at::kFloat).index_copy_(0, row, weighted));
        if (!probs || !probs_out) return;
        const auto slopes = (permuted->to(at::kFloat).index_select(0, row) * rows).sum(1);
        probs_out->copy_(
            at::zeros({map->numel()}, at::kFloat).index_add_(0, place, slopes).view(map->sizes()));
      };
    })
