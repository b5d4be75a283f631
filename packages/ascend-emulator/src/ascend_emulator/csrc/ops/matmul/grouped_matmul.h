// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Grouped matrix products. Semantics and limits: torch_npu's documentation of npu_grouped_matmul
// and npu_grouped_matmul_finalize_routing (torch_npu/_op_plugin_docs.py, BSD), their shape
// functions, op-plugin's call sites and tests.
#pragma once
#include "core/cost.h"
#include "ops/matmul/bf16_matmul.h"
#include "ops/quantization/quantized.h"

namespace emu::grouped {

using Lists = Opt<Tensors>;

inline bool empty(const Lists& list) { return !list || list->empty() || !list->front().defined(); }

// Slice of a group: from a list with one tensor per group, or a stacked tensor.
inline Tensor group_slice(const Lists& list, int64_t group, int64_t groups) {
  if (empty(list)) return {};
  if (static_cast<int64_t>(list->size()) == groups && groups > 1) return (*list)[group];
  const auto& only = list->front();
  return groups == 1 && only.dim() < 2               ? only
         : only.size(0) == groups && only.dim() >= 2 ? only[group]
                                                     : only;
}

struct Grouped {
  Tensors x, weight;
  Lists bias, scale, antiquant_scale, antiquant_offset, pertoken;
  Opt<Tensor> list;
  int64_t split, kind, list_kind, activation;
  Tensors out;

  bool words() const { return weight[0].scalar_type() == at::kInt; }
  // One stack of weights [groups, k, n].
  bool stacked() const { return weight.size() == 1 && weight[0].dim() == 3; }
  int64_t groups() const {
    return stacked() ? weight[0].size(0) : static_cast<int64_t>(weight.size());
  }

  void check_arguments() const {
    require(!x.empty() && !weight.empty(), "x and weight must not be empty");
    within("split_item", split, int64_t{0}, int64_t{3});
    one_of("group_type", kind, {int64_t{-1}, int64_t{0}, int64_t{2}});
    within("group_list_type", list_kind, int64_t{0}, int64_t{2});
    one_of("act_type", activation, {int64_t{0}});
    one_of("x", x[0], {at::kHalf, at::kBFloat16, at::kFloat, at::kChar});
    one_of("weight", weight[0], {at::kHalf, at::kBFloat16, at::kFloat, at::kChar, at::kInt});
    require(x.size() <= 128 && weight.size() <= 128, "x has ", x.size(), " tensors and weight ",
        weight.size(), "; at most 128 are allowed");
    const bool integers = x[0].scalar_type() == at::kChar,
               floats = !integers && weight[0].is_floating_point();
    if (floats) same_dtype("weight", weight[0], "x", x[0]);
    require(
        !integers || out[0].scalar_type() == at::kInt || !empty(scale), "an int8 x needs scale");
    require(integers || floats || !empty(antiquant_scale), "x is ", x[0].scalar_type(),
        " and weight ", weight[0].scalar_type(), "; that needs antiquant_scale");
    if (kind == 2) require(floats, "group_type 2 is for unquantized products");
    if (list) one_of("group_list", *list, {at::kLong});
    require(
        kind == -1 || list || x.size() > 1, "group_type ", kind, " with one x needs group_list");
    if (list && kind == 0) {
      rank("group_list", *list, list_kind == 2 ? 2 : 1);
      require(list->size(0) <= 1024, "group_list has ", list->size(0),
          " groups; at most 1024 are allowed");
      require(list_kind == 2 || list->size(0) == groups(), "group_list has ", list->size(0),
          " groups and weight ", groups());
    }
    if (kind == 0) rank("x", x[0], 2);
    for (const auto& each : weight) rank("weight", each, 2, 3);
    if (kind == 2) return;
    require(x.size() == 1 || weight.size() == 1 || x.size() == weight.size(), "x has ", x.size(),
        " tensors and weight ", weight.size());
    for (size_t i = 0; i < std::max(x.size(), weight.size()); ++i) {
      const auto& mine = weight[weight.size() == 1 ? 0 : i];
      const bool along_k =
          words() && mine.stride(-1) != 1 && mine.stride(-2) == 1;  // as unpack_matrix
      const int64_t k = x[x.size() == 1 ? 0 : i].size(-1),
                    rows = mine.size(-2) * (along_k ? kFourBitsInWord : 1),
                    n = mine.size(-1) * (words() && !along_k ? kFourBitsInWord : 1);
      require(k == rows, "x has ", k, " columns and weight ", i, " ", rows, " rows");
      for (const auto& [name, list] : {std::pair{"bias", &bias}, std::pair{"scale", &scale},
               std::pair{"antiquant_scale", &antiquant_scale},
               std::pair{"antiquant_offset", &antiquant_offset}}) {
        if (empty(*list)) continue;
        const auto& factor =
            (**list)[(*list)->size() == weight.size() ? (weight.size() == 1 ? 0 : i) : 0];
        require(factor.dim() > 0 && (factor.size(-1) == n || factor.size(-1) == 1), name,
            " has shape ", factor.sizes(), "; its last dimension must be that of weight ", i, ", ",
            n);
        const bool of_groups =
            stacked() ||
            ((*list)->size() == 1 && weight.size() > 1);  // the first dimension, if there are two
        const int64_t parts = factor.dim() > 1 + of_groups ? factor.size(-2) : 1;
        require(parts > 0 && rows % parts == 0, name, " has shape ", factor.sizes(), "; its ",
            parts, " groups do not divide the ", rows, " rows of the weight");
      }
    }
  }

  // The last dimension of what lies in memory is below 65536 ("InnerLimit"), and even of int4.
  void check_sizes() const {
    const auto inner = [](const Tensor& matrix) {
      const bool transposed = matrix.dim() > 1 && matrix.stride(-1) != 1 && matrix.stride(-2) == 1;
      return matrix.size(transposed ? -2 : -1) *
             (matrix.scalar_type() == at::kInt ? kFourBitsInWord : 1);
    };
    for (const auto& each : x)
      require(inner(each) < 65536, "x has shape ", each.sizes(), ", a last dimension of ",
          inner(each), "; allowed: below 65536");
    for (const auto& each : weight)
      require(inner(each) < 65536, "weight has shape ", each.sizes(), ", a last dimension of ",
          inner(each), "; allowed: below 65536");
    if (out.size() == 1)
      for (const auto& each : weight)
        require(each.size(-1) == weight[0].size(-1), "weights have ", weight[0].size(-1), " and ",
            each.size(-1), " columns; with one output they must have the same");
  }

  // By which axis is split, and pairs of group and count, of a group_list that is a tensor.
  void check_outputs() const {
    within("split_item", split, kind == -1 ? 0 : 2, kind == -1 ? 1 : 3);
    require(list_kind != 2 || (x[0].scalar_type() == at::kChar &&
                                  weight[0].scalar_type() == at::kChar && kind == 0),
        "group_list_type is 2, with x ", x[0].scalar_type(), ", weight ", weight[0].scalar_type(),
        " and group_type ", kind, "; it is for int8 and group_type 0");
  }

  // Dtypes of what belongs to the weights (tables 1 and 2 of the documentation; of an int8 x with
  // an int4 weight op-plugin's test).
  void check_parameters() const {
    const bool integers = x[0].scalar_type() == at::kChar, floats = weight[0].is_floating_point();
    const auto dtype = x[0].scalar_type(), result = out[0].scalar_type();
    const auto all = [](const char* name, const Lists& of, at::ScalarType allowed) {
      if (!empty(of))
        for (const auto& each : *of) one_of(name, each, {allowed});
    };
    if (!integers) {
      all("bias", bias, dtype == at::kHalf ? at::kHalf : at::kFloat);
      if (!floats)
        all("antiquant_scale", antiquant_scale, dtype),
            all("antiquant_offset", antiquant_offset, dtype);
      return;
    }
    all("per_token_scale", pertoken, at::kFloat);
    all("bias", bias, words() ? at::kFloat : at::kInt);
    if (words()) all("scale", scale, at::kLong);
    else if (result != at::kInt)
      all("scale", scale,
          result == at::kChar       ? at::kLong
          : result == at::kBFloat16 ? at::kBFloat16
                                    : at::kFloat);
  }

  // The matrix [k, n] of a group.
  Tensor matrix_of_group(const Tensor& rows, int64_t group) const {
    const auto mine = stacked() ? weight[0][group] : weight[group];
    const auto matrix = words() ? unpack_matrix(mine) : mine;
    cost::partial_access(stacked() ? weight[0] : weight[group], mine);
    const auto k = rows.size(-1);
    cost::add_flops(2.0 * static_cast<double>(rows.size(0) * k * matrix.size(1)),
        static_cast<int>(rows.element_size()));
    return matrix;
  }

  // out = x @ weight [k, n] of a group, times per-row scales; now, or with the groups in
  // `together`.
  void product(const Tensor& rows, int64_t group, const Tensor& row_scale, const Tensor& into,
      std::vector<BF16Product>& together) const {
    const auto matrix = matrix_of_group(rows, group);
    const bool in_bfloat16 =
        rows.scalar_type() == at::kBFloat16 && matrix.scalar_type() == at::kBFloat16;
    if (in_bfloat16 && into.scalar_type() == at::kBFloat16 &&
        empty(bias)) {  // with sums in float32, rounded once
      if (has_bf16_matmul(rows, matrix, into)) {
        together.push_back({rows, matrix, {}, into});
        return;
      }
      Tensor result = into;
      at::mm_out(result, rows, matrix);
      return;
    }
    store(values_of(rows, group, matrix, row_scale), into);
  }

  Tensor values_of(
      const Tensor& rows, int64_t group, const Tensor& matrix, const Tensor& row_scale) const {
    const int64_t count = groups();
    const auto add = group_slice(bias, group, count), factor = group_slice(scale, group, count);
    if (rows.scalar_type() != at::kChar) {
      const auto anti = group_slice(antiquant_scale, group, count),
                 offset = group_slice(antiquant_offset, group, count);
      const auto fp32 = anti.defined() ? dequantized(matrix, anti,
                                             offset.defined() ? Opt<Tensor>(offset) : std::nullopt)
                                       : matrix.to(at::kFloat);
      auto values = at::matmul(rows.to(at::kFloat), fp32);
      return add.defined() ? values + add.to(at::kFloat) : values;
    }
    if (words()) {  // the kernel splits int8 into signed halves: the bias contains the missing 8
                    // (op-plugin's test of A8W4)
      auto values = at::matmul(rows.to(at::kFloat) - 8, dequantized(matrix, factor, {}));
      if (add.defined()) values = values + add.to(at::kFloat);
      return row_scale.defined() ? values * row_scale : values;
    }
    auto sum = integer_product(rows, matrix);
    if (add.defined() && add.scalar_type() == at::kInt) sum = sum + add;
    if (!factor.defined()) return sum;
    auto values = sum.to(at::kFloat) * scale_values(factor).reshape({-1});
    if (row_scale.defined()) values = values * row_scale;
    return add.defined() && add.scalar_type() != at::kInt ? values + add.to(at::kFloat) : values;
  }

  static void store(const Tensor& values, const Tensor& into) {
    if (into.scalar_type() == at::kChar) store_rounded(values, into, false);
    else into.copy_(values);
  }

  void run() const {
    if (kind == 2) return run_by_columns();
    std::vector<BF16Product>
        together;  // few rows are bound by memory, which no thread waits to read
    run_by_rows(together);
    if (!together.empty()) bf16_matmuls(together);
  }

  void run_by_rows(std::vector<BF16Product>& together) const {
    // Per part: group, rows of x, their per-token scales, start row in a single output.
    const auto whole = empty(pertoken)         ? Tensor()
                       : pertoken->size() == 1 ? pertoken->front().reshape({-1, 1})
                                               : Tensor();
    int64_t place = 0;
    const auto part = [&](const Tensor& rows, int64_t group, int64_t index, int64_t first) {
      if (rows.numel() == 0) return;
      const auto row_scale = whole.defined()   ? whole.narrow(0, first, rows.size(0))
                             : empty(pertoken) ? Tensor()
                                               : (*pertoken)[index].reshape({-1, 1});
      product(rows, group, row_scale,
          out.size() > 1 ? out[index] : out[0].narrow(0, first, rows.size(0)), together);
    };
    if (x.size() > 1 || kind == -1) {
      for (size_t i = 0; i < x.size(); ++i) {
        if (out.size() == x.size())
          product(x[i].flatten(0, -2), i,
              empty(pertoken) ? Tensor() : group_slice(pertoken, i, groups()).reshape({-1, 1}),
              out[i].flatten(0, -2), together);
        else part(x[i], i, i, place);
        place += x[i].size(0);
      }
      return;
    }
    int64_t index = 0;
    for (const auto& [group, first, last] : rows_of(*list, list_kind, x[0].size(0)))
      part(x[0].narrow(0, first, last - first), group, index++, first);
  }

  void run_into(const Tensor& values) const {
    auto mine = *this;
    mine.out = {values};
    mine.run();
  }

  // Groups along k: out[g] = x[:, a:b] @ weight[a:b].
  void run_by_columns() const {
    const auto columns = x[0].to(at::kFloat),
               matrix = (weight[0].dim() == 3 ? weight[0][0] : weight[0]).to(at::kFloat);
    int64_t index = 0;
    out[0].zero_();
    for (const auto& [group, first, last] : rows_of(*list, list_kind, columns.size(1))) {
      auto values =
          at::matmul(columns.narrow(1, first, last - first), matrix.narrow(0, first, last - first));
      (out.size() > 1 ? out[index] : out[0].dim() == 3 ? out[0][index] : out[0]).copy_(values);
      ++index;
    }
  }
};

}  // namespace emu::grouped
