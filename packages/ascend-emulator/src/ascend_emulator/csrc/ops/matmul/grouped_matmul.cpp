// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "grouped_call.h"

#include "grouped_float_product.h"

#include "grouped_float_product.h"

using namespace emu;
using namespace emu::grouped;

namespace {

Computation grouped_matmul(const Grouped& call) {
  if (!call.x.empty() && !call.weight.empty() && is_low_precision(call.x[0])) {
    const FloatGroups groups{call};
    groups.check();
    return [=] { groups.run(); };
  }
  if (!call.x.empty() && !call.weight.empty() && is_low_precision(call.x[0])) {
    const FloatGroups groups{call};
    groups.check();
    return [=] { groups.run(); };
  }
  call.check_arguments();
  call.check_sizes();
  rule("grouped_matmul.parameters", [&] { call.check_parameters(); });
  return [=] { call.run(); };
}

template <class WeightList> struct Inputs {
  Tensors x;
  WeightList weight;
  Lists bias, scale, offset, antiquant_scale, antiquant_offset, pertoken;
  Opt<Tensor> list;
  Lists act_input, act_scale, act_offset;
  int64_t split, kind, list_kind, activation;
  FIELDS(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, pertoken, list,
      act_input, act_scale, act_offset, split, kind, list_kind, activation)
};
struct Results {
  Tensors out;
  Lists act_output, dynamic_scale;
  FIELDS(out, act_output, dynamic_scale)
};

template <class WeightList>
Computation grouped_matmul(const Inputs<WeightList>& in, const Results& to) {
  return grouped_matmul(
      {in.x, in.weight, in.bias, in.scale, in.antiquant_scale, in.antiquant_offset, in.pertoken,
          in.list, in.split, in.kind, in.list_kind, in.activation, to.out});
}

}  // namespace

CHECKED(aclnnGroupedMatmulV4, (Inputs<Tensors> in, Results to), { return grouped_matmul(in, to); })
CHECKED(aclnnGroupedMatmulV5, (Inputs<Tensors> in, Opt<Ints> tuning_config, Results to),
    { return grouped_matmul(in, to); })
CHECKED(aclnnGroupedMatmulWeightNz,
    (Inputs<Weights> in, Opt<Ints> tuning_config, int64_t quant_per_group_size, Results to),
    { return grouped_matmul(in, to); })
// group_list is a list of cumulative integers.
CHECKED(aclnnGroupedMatmul,
    (Tensors x, Tensors weight, Lists bias, Lists scale, Lists offset, Lists antiquant_scale,
        Lists antiquant_offset, Opt<Ints> list, int64_t split, Tensors out),
    {
      Opt<Tensor> ends;
      if (list && !list->empty()) {
        rule("grouped_matmul_list.wide-x", [&] { rank("x, with a group_list,", x.at(0), 2); });
        int64_t rows = 0;
        for (const auto& each : x) rows += each.size(0);
        rule("grouped_matmul_list.values",
            list->size() > 1 && list->front() >= 0 && list->back() == rows &&
                std::is_sorted(list->begin(), list->end()),
            "group_list is [", listed(*list), "]; it must increase to ", rows,
            ", the rows of x, and have more than one number");
        ends = at::tensor(*list, at::kLong);
      }
      return grouped_matmul({x, weight, bias, scale, antiquant_scale, antiquant_offset, {}, ends,
          split, ends ? 0 : -1, 0, 0, out});
    })

// npu_grouped_matmul_add: the gradients of the experts' weights, out[group] += x[rows]^T
// weight[rows]. By op-plugin's shape function, only group_type 2 is allowed; the transpositions
// have its own default.
CHECKED(aclnnGroupedMatmulAddV2,
    (Tensor x, Tensor weight, Tensor list, Tensor out, bool transpose_x, bool transpose_weight,
        int64_t kind, int64_t list_kind),
    {
      require(transpose_x && !transpose_weight, "transpose_x is ", transpose_x,
          " and transpose_weight ", transpose_weight, "; only true and false are allowed");
      require(out.size(-1) == weight.size(1) &&
                  out.numel() == list.numel() * x.size(1) * weight.size(1),
          "self has shape ", out.sizes(), "; [", list.numel(), " * ", x.size(1), ", ",
          weight.size(1), "] is needed");
      COMPUTE {
        const auto sums = out.view({list.numel(), x.size(1), weight.size(1)});
        for (const auto& [group, first, last] : rows_of(list, list_kind, x.size(0))) {
          cost::add_flops(2.0 * static_cast<double>((last - first) * x.size(1) * weight.size(1)),
              static_cast<int>(x.element_size()));
          sums[group].addmm_(x.narrow(0, first, last - first).to(at::kFloat).t(),
              weight.narrow(0, first, last - first).to(at::kFloat));
        }
      };
    })
CHECKED(aclnnGroupedMatmulAdd,
    (Tensor x, Tensor weight, Tensor list, Tensor out, bool transpose_x, bool transpose_weight,
        int64_t kind),
    {
      return body_aclnnGroupedMatmulAddV2(
          x, weight, list, out, transpose_x, transpose_weight, kind, 0);
    })
