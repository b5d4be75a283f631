// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Grouped matrix products. Semantics and limits: torch_npu's documentation of npu_grouped_matmul
// and npu_grouped_matmul_finalize_routing (torch_npu/_op_plugin_docs.py, BSD), their shape
// functions, op-plugin's call sites and tests.
#pragma once
#include "core/cost.h"
#include "ops/cube_math.h"
#include "ops/matmul/kernels/bf16_matmul.h"
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

inline bool is_transposed(const Tensor& matrix) {  // as unpack_matrix
  return matrix.dim() > 1 && matrix.stride(-1) != 1 && matrix.stride(-2) == 1;
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
    require(x.size() <= 128 && weight.size() <= 128, "x has ", x.size(), " tensors and weight ",
        weight.size(), "; at most 128 are allowed");
    require_emulated(
        x[0].scalar_type() != at::kInt, "x of int4, eight of which are an int32, is not emulated");
    const bool integers = x[0].scalar_type() == at::kChar,
               floats = !integers && weight[0].is_floating_point();
    require(
        !integers || out[0].scalar_type() == at::kInt || !empty(scale), "an int8 x needs scale");
    require(integers || floats || !empty(antiquant_scale), "x is ", x[0].scalar_type(),
        " and weight ", weight[0].scalar_type(), "; that needs antiquant_scale");
    rule("grouped_matmul.list-needed", kind == -1 || list || x.size() > 1, "group_type ", kind,
        " with one x needs group_list");
    if (list && kind == 0 && list_kind != 2)
      rule("grouped_matmul.groups", list->size(0) == groups(), "group_list has ", list->size(0),
          " groups and weight ", groups());
    if (kind == 2)
      return rule("grouped_matmul.columns", x.size() == 1 && x[0].dim() == 2 && x[0].stride(0) == 1,
          "x has strides ", x[0].strides(), " for shape ", x[0].sizes(),
          "; with group_type 2 one transposed x is allowed");
    rule("grouped_matmul.weight-ranks", [&] {
      for (const auto& each : weight) rank("weight", each, kind == 0 && weight.size() == 1 ? 3 : 2);
    });
    for (const auto& each : weight)
      rule("grouped_matmul.weights-transposed", is_transposed(each) == is_transposed(weight[0]),
          "some weights are transposed and some not; allowed: all or none");
    rule("grouped_matmul.x-transposed", [&] {
      for (const auto& each : x)
        require(!is_transposed(each), "x has strides ", each.strides(), " for shape ", each.sizes(),
            "; a transposed one is for group_type 2");
    });
    rule("grouped_matmul.list-sizes", [&] { check_lists(); });
    for (size_t i = 0; i < std::max(x.size(), weight.size()); ++i) check_factors(i);
  }

  std::array<std::pair<const char*, const Lists*>, 4> factors() const {
    return {{{"bias", &bias}, {"scale", &scale}, {"antiquant_scale", &antiquant_scale},
        {"antiquant_offset", &antiquant_offset}}};
  }

  void check_lists() const {
    require(x.size() == 1 || x.size() == weight.size(), "x has ", x.size(), " tensors and weight ",
        weight.size());
    for (const auto& [name, of] : factors())
      require(empty(*of) || (*of)->size() == weight.size(), name, " has ", *of ? (*of)->size() : 0,
          " tensors and weight ", weight.size());
    if (empty(pertoken)) return;
    require(pertoken->size() == x.size(), "per_token_scale has ", pertoken->size(),
        " tensors and x ", x.size());
    for (size_t i = 0; i < x.size(); ++i)
      require((*pertoken)[i].numel() * x[i].size(-1) == x[i].numel(), "per_token_scale has shape ",
          (*pertoken)[i].sizes(), " and x ", x[i].sizes(), "; one scale per row is needed");
  }

  // Rows of weight i.
  int64_t inner(size_t i) const {
    const auto& mine = weight[weight.size() == 1 ? 0 : i];
    return mine.size(-2) * (words() && is_transposed(mine) ? kFourBitsInWord : 1);
  }

  void check_factors(size_t i) const {
    const auto& mine = weight[weight.size() == 1 ? 0 : i];
    const bool along_k = words() && is_transposed(mine);
    const int64_t k = x[x.size() == 1 ? 0 : i].size(-1), rows = inner(i),
                  n = mine.size(-1) * (words() && !along_k ? kFourBitsInWord : 1);
    require(k == rows, "x has ", k, " columns and weight ", i, " ", rows, " rows");
    rule("grouped_matmul.factors", [&] {
      for (const auto& [name, of] : factors()) {
        if (empty(*of)) continue;
        const auto& factor = (**of)[weight.size() == 1 ? 0 : i];
        require(factor.dim() > 0 && (factor.size(-1) == n || factor.size(-1) == 1), name,
            " has shape ", factor.sizes(), "; its last dimension must be that of weight ", i, ", ",
            n);
        // The first dimension of a stack is that of groups.
        require(!stacked() || (factor.dim() == 1 && groups() == 1) || factor.size(0) == groups(),
            name, " has shape ", factor.sizes(), "; its first dimension must be that of weight, ",
            groups());
        const int64_t parts = factor.dim() > 1 + stacked() ? factor.size(-2) : 1;
        require(parts > 0 && rows % parts == 0, name, " has shape ", factor.sizes(), "; its ",
            parts, " groups do not divide the ", rows, " rows of the weight");
        require(parts == 1 || !along_k || rows / parts % 2 == 0, name, " has groups of ",
            rows / parts, " rows; of a transposed weight they must be even");
        const auto& first = (**of)[0];
        require(parts == 1 || stacked() || rows * first.size(-2) == inner(0) * parts, name,
            " has groups of ", rows / parts, " rows; all weights must have the same");
      }
    });
  }

  // The last dimension of what lies in memory ("InnerLimit").
  void check_sizes() const {
    rule("grouped_matmul.inner", [&] {
      const auto check = [](const char* name, const Tensor& matrix) {
        const int64_t inner = matrix.size(is_transposed(matrix) ? -2 : -1) *
                              (matrix.scalar_type() == at::kInt ? kFourBitsInWord : 1);
        require(inner < 65536, name, " has shape ", matrix.sizes(), ", a last dimension of ", inner,
            "; allowed: below 65536");
      };
      for (const auto& each : x) check("x", each);
      for (const auto& each : weight) check("weight", each);
    });
    if (out.size() == 1)
      rule("grouped_matmul.same-columns", [&] {
        for (const auto& each : weight)
          require(each.size(-1) == weight[0].size(-1), "weights have ", weight[0].size(-1), " and ",
              each.size(-1), " columns; with one output they must have the same");
      });
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
    all("bias", bias, words() ? at::kFloat : at::kInt);
    if (words()) all("scale", scale, at::kLong);
    else if (result != at::kInt)
      all("scale", scale,
          result == at::kChar       ? at::kLong
          : result == at::kBFloat16 ? at::kBFloat16
                                    : at::kFloat);
  }

  std::vector<Rows> parts(int64_t rows) const {
    std::vector<Rows> parts;
    rule("grouped_matmul.group-list", [&] { parts = rows_of(*list, list_kind, rows); });
    return parts;
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
      multiply_into(kMatmul, into, rows, matrix);
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
    return activated(
        add.defined() && add.scalar_type() != at::kInt ? values + add.to(at::kFloat) : values);
  }

  Tensor activated(const Tensor& values) const {
    switch (activation) {
      case 1: return at::relu(values);
      case 2: return at::gelu(values, "tanh");
      case 4: return values * at::sigmoid(values * 1.702);  // npu_fast_gelu
      case 5: return at::silu(values);
      default: return values;
    }
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
    if (x.size() > 1 && list) check_rows_of_lists();
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
    for (const auto& [group, first, last] : parts(x[0].size(0)))
      part(x[0].narrow(0, first, last - first), group, index++, first);
  }

  void check_rows_of_lists() const {
    int64_t total = 0;
    for (const auto& each : x) total += each.size(0);
    const auto counted = parts(total);
    rule("grouped_matmul.rows-of-lists", [&] {
      for (size_t i = 0; i < counted.size() && i < x.size(); ++i)
        require(counted[i].last - counted[i].first == x[i].size(0), "group_list has ",
            counted[i].last - counted[i].first, " rows for x ", i, ", which has ", x[i].size(0));
    });
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
    for (const auto& [group, first, last] : parts(columns.size(1))) {
      auto values =
          at::matmul(columns.narrow(1, first, last - first), matrix.narrow(0, first, last - first));
      (out.size() > 1 ? out[index] : out[0].dim() == 3 ? out[0][index] : out[0]).copy_(values);
      ++index;
    }
  }
};

}  // namespace emu::grouped
