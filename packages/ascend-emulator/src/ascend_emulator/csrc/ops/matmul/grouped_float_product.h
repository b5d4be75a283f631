// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// npu_grouped_matmul of float8, HiF8 and float4, on Ascend950, in the layouts of op-plugin's
// _scaled_grouped_mm. float_product.h multiplies the groups.
#pragma once
#include "float_product.h"
#include "grouped_call.h"

namespace emu::grouped {

// Rows of one x with a stack of weights [groups, k, n]. A scale has a first dimension of groups.
struct FloatGroups {
  Grouped call;

  void check() const {
    require_emulated(call.kind == 0 && call.stacked() && call.x.size() == 1 && call.out.size() == 1,
        "float8, HiF8 and float4 are emulated with group_type 0, one x and one stacked weight");
    require_emulated(is_low_precision(call.weight[0]), "x is ", call.x[0].scalar_type(),
        " and weight ", call.weight[0].scalar_type(), "; that is not emulated");
    require_emulated(call.activation == 0, "act_type ", call.activation, " is not emulated");
    rule("grouped_float_product.scale-needed", !empty(call.scale) && call.list,
        "float8, HiF8 and float4 need scale and group_list");
    rule("grouped_float_product.groups",
        call.scale->front().size(0) == call.groups() && call.list->size(0) == call.groups(),
        "scale has shape ", call.scale->front().sizes(), " and group_list ", call.list->sizes(),
        "; weight has ", call.groups(), " groups");
    of({0, 0, call.x[0].size(0)}).check();
  }

  void run() const {
    for (const auto& each : call.parts(call.x[0].size(0))) {
      if (each.last == each.first) continue;
      const auto product = of(each);
      cost::partial_access(call.weight[0], product.x2);
      cost::add_flops(2.0 * static_cast<double>(product.out.numel() * product.k()), 1);
      product.run();
    }
  }

 private:
  FloatProduct of(const Rows& each) const {
    const auto rows = [&](const Tensor& of) {
      return of.narrow(0, each.first, each.last - each.first);
    };
    const auto mine = [&](const Lists& list) {
      return empty(list) ? Opt<Tensor>() : Opt<Tensor>(list->front()[each.group]);
    };
    const auto row_scale =
        empty(call.pertoken) ? Opt<Tensor>() : Opt<Tensor>(rows(call.pertoken->front()));
    return {rows(call.x[0]), call.weight[0][each.group], *mine(call.scale), row_scale,
        mine(call.bias), row_scale && row_scale->dim() > 1 ? 1 : 0, rows(call.out[0])};
  }
};

}  // namespace emu::grouped
