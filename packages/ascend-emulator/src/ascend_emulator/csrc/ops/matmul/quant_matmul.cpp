// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matrix products of quantized inputs. Semantics and limits: torch_npu's documentation of
// npu_quant_matmul, npu_weight_quant_batchmatmul and npu_batch_gather_matmul
// (torch_npu/_op_plugin_docs.py, BSD), their shape functions
// (op_plugin/meta/_meta_registrations.py), op-plugin's tests.
#include "float_product.h"
#include "ops/quantization/quantized.h"

using namespace emu;

namespace {

bool absent(const Opt<Tensor>& tensor) { return !tensor || tensor->numel() == 0; }

bool transposed(const Tensor& matrix) { return matrix.stride(-1) != 1 && matrix.stride(-2) == 1; }

// Packed int4 is along the contiguous dimension, as in unpack_matrix.
void same_inner(const char* name, int64_t columns, const char* other, const Tensor& matrix) {
  const bool packed = matrix.scalar_type() == at::kInt && transposed(matrix);
  const int64_t rows = matrix.size(-2) * (packed ? kFourBitsInWord : 1);
  require(columns == rows, name, " has ", columns, " columns and ", other, " ", rows, " rows");
}

struct Quantized {
  Tensor x1, x2, scale;
  Opt<Tensor> offset, pertoken, bias, y_offset;
  Tensor out;
  bool in_nz;  // x2, whose matrix is a copy then

  bool words1() const { return x1.scalar_type() == at::kInt; }
  bool words2() const { return x2.scalar_type() == at::kInt; }

  void check_arguments() const {
    const int64_t k = x1.size(-1) * (words1() ? kFourBitsInWord : 1), n = out.size(-1);
    rule("quant_matmul.columns", [&] { same_inner("x1", k, "x2", x2); });
    const auto per_column = [&](const char* name, const Tensor& of) {
      require(of.numel() == 1 || of.numel() == n, name, " has shape ", of.sizes(),
          "; allowed: [1] and [", n, "]");
    };
    // A view of one row or column is both.
    rule("quant_matmul.transposed-310p",
        !is_chip("Ascend310P") ||
            ((in_nz || transposed(x2) || x2.size(-1) == 1 || x2.size(-2) == 1) && !transposed(x1)),
        "x1 has strides ", x1.strides(), " and x2 ", x2.strides(), " for shape ", x2.sizes(), "; ",
        chip().name, " takes x2 as a transposed view of [n, k] or in FRACTAL_NZ, and x1 as it is");
    if (grouped()) return;
    rule("quant_matmul.scale-size", [&] { per_column("scale", scale); });
    if (!absent(offset)) rule("quant_matmul.offset-size", [&] { per_column("offset", *offset); });
  }

  // Per-group scales of x2's rows.
  bool grouped() const { return scale.dim() == 2 && scale.size(0) > 1; }

  void run() const {
    const auto left = words1() ? unpack_int4(x1) : x1, right = words2() ? unpack_matrix(x2) : x2;
    if (grouped()) return run_grouped(left, right);
    auto sum = integer_product(left, right);
    const bool integer_bias = !absent(bias) && bias->scalar_type() == at::kInt;
    if (integer_bias) sum = sum + *bias;
    if (out.scalar_type() == at::kInt) {
      out.copy_(sum);
      return;
    }
    auto values = sum.to(at::kFloat) * scale_values(scale).reshape({-1});
    if (!absent(pertoken)) values = values * pertoken->reshape({-1, 1});
    if (!absent(bias) && !integer_bias) values = values + bias->to(at::kFloat);
    if (!absent(offset)) values = values + offset->reshape({-1});
    if (out.scalar_type() == at::kChar) store_rounded(values, out, false);
    else out.copy_(values);
  }

  // int4 x int4: per group, x2 - offset. int8 x int4: x1 - 8, which y_offset compensates (the
  // kernel splits int8 into signed halves; test_npu_quant_matmul.py).
  void run_grouped(const Tensor& left, const Tensor& right) const {
    Tensor values;
    if (words1()) {
      auto weight = right.to(at::kFloat);
      if (!absent(offset))
        weight =
            weight - offset->to(at::kFloat).repeat_interleave(weight.size(0) / offset->size(0), 0);
      values = at::matmul(left.to(at::kFloat), dequantized(weight, scale, {}));
    } else {
      values = at::matmul(left.to(at::kFloat) - 8, dequantized(right, scale, {}));
      if (!absent(y_offset)) values = values + *y_offset;
    }
    if (!absent(pertoken)) values = values * pertoken->reshape({-1, 1});
    out.copy_(values);
  }
};

template <class Matrix> struct QuantMatmul {
  Tensor x1;
  Matrix x2;
  Opt<Tensor> pertoken;
  Tensor scale;
  Opt<Tensor> y_scale, x1_offset, offset, y_offset, bias;
  bool transpose_x1, transpose_x2;
  int64_t group_size;
  Tensor out;
  FIELDS(x1, x2, pertoken, scale, y_scale, x1_offset, offset, y_offset, bias, transpose_x1,
      transpose_x2, group_size, out)

  Computation computation() const {
    require_emulated(absent(y_scale), "y_scale is not emulated");
    require_emulated(!transpose_x1 && !transpose_x2,
        "transposing flags are not emulated; torch_npu passes transposed views");
    bool in_nz = false;
    if constexpr (std::is_same_v<Matrix, Weight>) in_nz = x2.storage.defined();
    if (is_low_precision(x1)) {
      const FloatProduct product{x1, x2, scale, pertoken, bias, group_size >> 32, out};
      product.check();
      require(absent(offset), "offset is given; of float8, HiF8 and float4 None is allowed");
      return [=] { product.run(); };
    }
    const Quantized product{x1, x2, scale, offset, pertoken, bias, y_offset, out, in_nz};
    product.check_arguments();
    return [=] { product.run(); };
  }
};

}  // namespace

CHECKED(aclnnQuantMatmulV5, (QuantMatmul<Tensor> call), { return call.computation(); })
CHECKED(aclnnQuantMatmulWeightNz, (QuantMatmul<Weight> call), { return call.computation(); })

namespace {

struct WeightQuant {
  Tensor x;
  Weight weight;
  Tensor scale;
  Opt<Tensor> offset, quant_scale, quant_offset, bias;
  int group;
  FIELDS(x, weight, scale, offset, quant_scale, quant_offset, bias, group)

  Computation computation(const Tensor& out) const;
};

Computation WeightQuant::computation(const Tensor& out) const {
  const int64_t n = out.size(-1), groups = group ? (x.size(-1) + group - 1) / group : 1;
  rule("weight_quant_matmul.columns", [&] { same_inner("x", x.size(-1), "weight", weight); });
  rule("weight_quant_matmul.rows", [&] {
    within("the rows of x", x.size(-2), int64_t{1}, (int64_t{1} << (transposed(x) ? 16 : 31)) - 1);
  });
  if (scale.scalar_type() == at::kLong)
    rule("weight_quant_matmul.int64-weight", transposed(weight),
        "weight is not transposed; with an int64 antiquant_scale it must be");
  rule("weight_quant_matmul.scale-size", scale.numel() == 1 || scale.numel() == n * groups,
      "antiquant_scale has shape ", scale.sizes(), "; allowed: one, or ", groups, " x ", n);
  if (group)
    rule("weight_quant_matmul.groups", [&] {
      require(!is_chip("Ascend310P"), "antiquant_group_size is ", group, "; Ascend310P allows 0");
      within("antiquant_group_size", int64_t{group}, int64_t{32}, x.size(-1) - 1);
      multiple("antiquant_group_size", group, 32);
    });
  if (quant_scale)
    require(quant_scale->numel() == 1 || quant_scale->numel() == n, "quant_scale has shape ",
        quant_scale->sizes(), "; allowed: one, or ", n);
  return [=, *this] {
    const auto integers = weight.scalar_type() == at::kInt ? unpack_matrix(weight) : Tensor(weight);
    const auto spread = [&](const Tensor& parameter) {
      const auto fp32 = scale_values(parameter);
      if (fp32.numel() == 1) return fp32.reshape({1, 1});
      return groups == 1 ? fp32.reshape({1, n})
                         : fp32.repeat_interleave(group, 0).narrow(0, 0, integers.size(0));
    };
    auto values = integers.to(at::kFloat);
    if (offset) values = values + spread(*offset);
    auto result = at::matmul(x.to(at::kFloat), values * spread(scale));
    if (bias) result = result + bias->to(at::kFloat).reshape({-1});
    if (!quant_scale) {
      out.copy_(result);
      return;
    }
    result = result * scale_values(*quant_scale).reshape({-1});
    if (quant_offset) result = result + quant_offset->to(at::kFloat).reshape({-1});
    store_rounded(result, out, false);
  };
}

}  // namespace

CHECKED(aclnnWeightQuantBatchMatmulV2, (WeightQuant call, Tensor out),
    { return call.computation(out); })
// On Ascend950, where V2 takes no weight in FRACTAL_NZ.
CHECKED(aclnnWeightQuantBatchMatmulNz, (WeightQuant call, Tensor out),
    { return call.computation(out); })
CHECKED(aclnnWeightQuantBatchMatmulV3, (WeightQuant call, int64_t inner_precise, Tensor out),
    { return call.computation(out); })

// y[:, offset : offset + size] + scale x A[index] B[index]; an invalid index leaves the row
// unchanged (no LoRA adapter).
CHECKED(aclnnAddLora,
    (Tensor y, Tensor x, Tensor weight_b, Tensor indices, Opt<Tensor> weight_a, int64_t layer,
        double scale, int64_t start, int64_t size, Tensor out),
    {
      within("layer_idx", layer, int64_t{0}, weight_b.size(1) - 1);
      require(start >= 0 && size > 0 && start + size <= y.size(1), "the slice [", start, ", ",
          start + size, ") is outside y's ", y.size(1), " columns");
      require(weight_b.size(2) == size, "weight_b has shape ", weight_b.sizes(),
          "; dimension 2 must be y_slice_size, ", size);
      COMPUTE {
        const auto index = indices.to(at::kLong);
        const auto known = at::logical_and(index >= 0, index < weight_b.size(0));
        const auto which = index.where(known, at::zeros_like(index));
        const auto chosen = [&](const Tensor& w) {
          return w.select(1, layer).to(at::kFloat).index_select(0, which).transpose(1, 2);
        };
        auto values = x.to(at::kFloat).unsqueeze(1);
        if (weight_a) values = at::bmm(values, chosen(*weight_a));
        values = at::bmm(values, chosen(weight_b)).squeeze(1) * scale * known.unsqueeze(1);
        if (out.data_ptr() != y.data_ptr()) out.copy_(y);
        out.narrow(1, start, size).copy_(y.narrow(1, start, size).to(at::kFloat) + values);
      };
    })
