// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "grouped_matmul.h"

using namespace emu;
using namespace emu::grouped;

namespace {

Computation grouped_matmul(const Grouped& call, const Lists& offset, bool by_tensor) {
  call.check_arguments();
  if (by_tensor) call.check_outputs();
  call.check_sizes();
  call.check_parameters();
  require(empty(offset) || call.words(), "offset is given; only None is allowed");
  return [=] { call.run(); };
}

}  // namespace

#define GROUPED_MATMUL(NAME, WEIGHTS, ...)                                                      \
  CHECKED(NAME,                                                                                 \
      (Tensors x, WEIGHTS weight, Lists bias, Lists scale, Lists offset, Lists antiquant_scale, \
          Lists antiquant_offset, Lists pertoken, Opt<Tensor> list, Lists, Lists, Lists,        \
          int64_t split, int64_t kind, int64_t list_kind, int64_t activation,                   \
          __VA_ARGS__ Tensors out, Lists, Lists),                                               \
      {                                                                                         \
        const Grouped call{x, weight, bias, scale, antiquant_scale, antiquant_offset, pertoken, \
            list, split, kind, list_kind, activation, out};                                     \
        return grouped_matmul(call, offset, true);                                              \
      })
GROUPED_MATMUL(aclnnGroupedMatmulV4, Tensors)
GROUPED_MATMUL(aclnnGroupedMatmulV5, Tensors, Opt<Ints>, )  // tuning_config
GROUPED_MATMUL(aclnnGroupedMatmulWeightNz, Weights, Opt<Ints>,
    int64_t, )  // tuning_config, quant_per_group_size
// group_list is a list of cumulative integers.
CHECKED(aclnnGroupedMatmul,
    (Tensors x, Tensors weight, Lists bias, Lists scale, Lists offset, Lists antiquant_scale,
        Lists antiquant_offset, Opt<Ints> list, int64_t split, Tensors out),
    {
      Opt<Tensor> ends;
      if (list && !list->empty()) ends = at::tensor(*list, at::kLong);
      return grouped_matmul({x, weight, bias, scale, antiquant_scale, antiquant_offset, {}, ends,
                                split, ends ? 0 : -1, 0, 0, out},
          offset, false);
    })

// npu_grouped_matmul_add: the gradients of the experts' weights, out[group] += x[rows]^T
// weight[rows]. By op-plugin's shape function, only group_type 2 is allowed; the transpositions
// have its own default.
namespace {
Computation add_grouped(const Tensor& x, const Tensor& weight, const Tensor& list,
    const Tensor& out, bool transpose_x, bool transpose_weight, int64_t kind, int64_t list_kind) {
  one_of("x", x, kHalves);
  same_dtype("weight", weight, "x", x);
  one_of("self", out, {at::kFloat});
  one_of("group_list", list, {at::kLong});
  one_of("group_type", kind, {int64_t{2}});
  within("group_list_type", list_kind, int64_t{0}, int64_t{1});
  require(transpose_x && !transpose_weight, "transpose_x is ", transpose_x,
      " and transpose_weight ", transpose_weight, "; only true and false are allowed");
  rank("x", x, 2);
  rank("weight", weight, 2);
  rank("group_list", list, 1);
  rank("self", out, 2, 3);
  require(weight.size(0) == x.size(0), "x has ", x.size(0), " rows and weight ", weight.size(0));
  require(
      out.size(-1) == weight.size(1) && out.numel() == list.numel() * x.size(1) * weight.size(1),
      "self has shape ", out.sizes(), "; [", list.numel(), " * ", x.size(1), ", ", weight.size(1),
      "] is needed");
  COMPUTE {
    const auto sums = out.view({list.numel(), x.size(1), weight.size(1)});
    for (const auto& [group, first, last] : rows_of(list, list_kind, x.size(0))) {
      cost::add_flops(2.0 * static_cast<double>((last - first) * x.size(1) * weight.size(1)),
          static_cast<int>(x.element_size()));
      sums[group].addmm_(x.narrow(0, first, last - first).to(at::kFloat).t(),
          weight.narrow(0, first, last - first).to(at::kFloat));
    }
  };
}
}  // namespace
CHECKED(aclnnGroupedMatmulAdd,
    (Tensor x, Tensor weight, Tensor list, Tensor out, bool transpose_x, bool transpose_weight,
        int64_t kind),
    { return add_grouped(x, weight, list, out, transpose_x, transpose_weight, kind, 0); })
CHECKED(aclnnGroupedMatmulAddV2,
    (Tensor x, Tensor weight, Tensor list, Tensor out, bool transpose_x, bool transpose_weight,
        int64_t kind, int64_t list_kind),
    { return add_grouped(x, weight, list, out, transpose_x, transpose_weight, kind, list_kind); })
