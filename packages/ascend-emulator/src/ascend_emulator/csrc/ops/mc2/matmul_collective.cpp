// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matrix products fused with a collective: npu_mm_all_reduce_base, npu_all_gather_base_mm,
// npu_mm_reduce_scatter_base; and the barrier. Semantics and limits: torch_npu's documentation of
// these (op-plugin's docs/zh/custom_APIs/torch_npu, BSD) and op-plugin's tests. As on the device,
// the partial products that are reduced have the output's dtype.
#include "ops/quantization/quantized.h"
#include "moe_distribute.h"

using namespace emu;
using mc2::absent;

namespace {

constexpr int64_t kMostColumns = 65535;

struct Product {
  Tensor x1, x2;
  Opt<Tensor> bias, scale, pertoken,
      offset;         // scale and offset: of the weight if x1 is floating, else of the result
  int64_t group = 0;  // rows of the weight per scale; 0: all

  bool quantized() const { return x1.scalar_type() == at::kChar; }
  bool weight_quantized() const { return !quantized() && x2.scalar_type() == at::kChar; }
  int64_t rows() const { return x1.numel() / x1.size(-1); }

  void check_arguments(const Tensor& out) const {
    require(x1.numel() > 0 && x2.numel() > 0, "x1 has shape ", x1.sizes(), " and x2 ", x2.sizes(),
        "; they must not be empty");
    require(
        x1.size(-1) == x2.size(0), "x1 has ", x1.size(-1), " columns and x2 ", x2.size(0), " rows");
    rule("matmul_collective.transposed", x1.size(-1) == 1 || x1.stride(-1) == 1, "x1 has strides ",
        x1.strides(), "; it must not be transposed");
    const int64_t n = x2.size(1);
    rule("matmul_collective.bias", [&] {
      if (absent(bias)) return;
      one_of("bias", *bias, quantized() ? DTypes{at::kInt} : DTypes{x1.scalar_type()});
      shape("bias", *bias, {n});
    });
    if (!quantized() && !weight_quantized()) return;
    within("k", x1.size(-1), int64_t{1}, kMostColumns);
    const char* name = quantized() ? "dequant_scale" : "antiquant_scale";
    require(!absent(scale), name, " is None; it is needed with an int8 x2");
    if (quantized()) {
      one_of("out", out, kHalves);
      require(scale->numel() == 1 || scale->numel() == n, name, " has shape ", scale->sizes(),
          "; allowed: [1], [", n, "] and [1, ", n, "]");
      if (absent(pertoken)) return;
      require(pertoken->numel() == rows(), "pertoken_scale has shape ", pertoken->sizes(),
          "; one for each of ", rows(), " rows is needed");
      return;
    }
    within("n", n, int64_t{1}, kMostColumns);
    same_dtype(name, *scale, "x1", x1);
    if (group) {
      within("antiquant_group_size", group, int64_t{32}, x1.size(-1) - 1);
      multiple("antiquant_group_size", group, 32);
      shape(name, *scale, {(x1.size(-1) + group - 1) / group, n});
    } else {
      require(scale->numel() == 1 || scale->numel() == n, name, " has shape ", scale->sizes(),
          "; allowed: [1], [", n, "] and [1, ", n, "]");
    }
    if (absent(offset)) return;
    same_dtype("antiquant_offset", *offset, "x1", x1);
    shape("antiquant_offset", *offset, scale->sizes());
  }

  // [rows, n] in float.
  Tensor values(const Tensor& left) const {
    const auto flat = left.reshape({-1, left.size(-1)});
    if (quantized()) {
      auto sum = integer_product(flat, x2);
      if (!absent(bias)) sum = sum + *bias;
      auto fp32 = sum.to(at::kFloat) * scale_values(*scale).reshape({1, -1});
      return absent(pertoken) ? fp32 : fp32 * pertoken->reshape({-1, 1});
    }
    auto weight = x2.to(at::kFloat);
    if (weight_quantized()) {
      const auto spread = [&](const Tensor& parameter) {
        const auto fp32 = parameter.to(at::kFloat);
        return group ? fp32.repeat_interleave(group, 0).narrow(0, 0, weight.size(0))
                     : fp32.reshape({1, -1});
      };
      if (!absent(offset)) weight = weight + spread(*offset);
      weight = weight * spread(*scale);
    }
    auto result = at::matmul(flat.to(at::kFloat), weight);
    return absent(bias) ? result : result + bias->to(at::kFloat);
  }
  Tensor values() const { return values(x1); }
};

Computation all_reduce(
    const Product& product, const Opt<Tensor>& x3, const Text& hcom, const Tensor& out) {
  const auto on = hccl::group("hcom", hcom);
  require(on->ranks == 1 || on->ranks == 2 || on->ranks == 4 || on->ranks == 8, "hcom has ",
      on->ranks, " ranks; allowed: 1, 2, 4, 8");
  product.check_arguments(out);
  auto form = product.x1.sizes().vec();
  form.back() = product.x2.size(1);
  shape("out", out, form);
  if (!absent(x3)) {
    same_dtype("x3", *x3, "out", out);
    shape("x3", *x3, form);
  }
  on->claim(hccl::kMatmulAllReduce);
  return [=] {
    auto partial = product.values().view(out.sizes());
    if (!absent(x3)) partial = partial + x3->to(at::kFloat);
    partial = partial.to(out.scalar_type());
    auto call = hccl::fused_header(hccl::kMatmulAllReduce, out.scalar_type(), out.numel());
    call.op = hccl::kSum;
    hccl::fused(
        *on, call, [&] { hccl::all_reduce(*on, call, partial.data_ptr(), partial.data_ptr()); });
    out.copy_(partial);
  };
}

}  // namespace

CHECKED(aclnnMatmulAllReduce,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Text hcom, Text reduce_op, int64_t comm_turn, int64_t,
        Tensor out),
    { return all_reduce({x1, x2, bias, {}, {}, {}}, {}, hcom, out); })
CHECKED(aclnnMatmulAllReduceV2,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> x3, Text hcom, Text reduce_op,
        int64_t comm_turn, int64_t, Tensor out),
    { return all_reduce({x1, x2, bias, {}, {}, {}}, x3, hcom, out); })
CHECKED(aclnnMatmulAllReduceV3,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> x3, Text hcom, Text reduce_op,
        Text comm_mode, int64_t comm_turn, int64_t, Tensor out),
    { return all_reduce({x1, x2, bias, {}, {}, {}}, x3, hcom, out); })

CHECKED(aclnnQuantMatmulAllReduce,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> x3, Opt<Tensor> scale, Text hcom,
        Text reduce_op, int64_t comm_turn, int64_t, Tensor out),
    { return all_reduce({x1, x2, bias, scale, {}, {}}, x3, hcom, out); })
CHECKED(aclnnQuantMatmulAllReduceV2,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> x3, Opt<Tensor> scale,
        Opt<Tensor> pertoken, Text hcom, Text reduce_op, int64_t comm_turn, int64_t, Tensor out),
    { return all_reduce({x1, x2, bias, scale, pertoken, {}}, x3, hcom, out); })
CHECKED(aclnnQuantMatmulAllReduceV5,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> x3, Opt<Tensor> pertoken,
        Opt<Tensor> scale, Opt<Tensor> comm_scale_1, Opt<Tensor> comm_scale_2, Text hcom,
        Text reduce_op, Text comm_mode, int64_t comm_turn, int64_t, int64_t,
        int64_t comm_quant_mode, Tensor out),
    {
      require_emulated(absent(comm_scale_1) && absent(comm_scale_2),
          "comm_quant_scale_1 and comm_quant_scale_2 are given; quantized communication is not "
          "emulated");
      return all_reduce({x1, x2, bias, scale, pertoken, {}}, x3, hcom, out);
    })
CHECKED(aclnnWeightQuantMatmulAllReduce,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> scale, Opt<Tensor> offset, Opt<Tensor> x3,
        Text hcom, Text reduce_op, int64_t comm_turn, int64_t, int64_t group, Tensor out),
    { return all_reduce({x1, x2, bias, scale, {}, offset, group}, x3, hcom, out); })
CHECKED(aclnnWeightQuantMatmulAllReduceV2,
    (Tensor x1, Weight x2, Opt<Tensor> bias, Opt<Tensor> scale, Opt<Tensor> offset, Opt<Tensor> x3,
        Text hcom, Text reduce_op, Text comm_mode, int64_t comm_turn, int64_t, int64_t group,
        Tensor out),
    { return all_reduce({x1, x2, bias, scale, {}, offset, group}, x3, hcom, out); })

namespace {

// Checks of the all-gather and reduce-scatter operators.
std::shared_ptr<hccl::Communicator> sharded(
    const Product& product, const Text& hcom, const Tensor& out) {
  const auto on = hccl::group("hcom", hcom);
  const bool many = on->ranks == 16 || on->ranks == 32;
  rule("matmul_sharded.ranks-of-communicator",
      on->ranks == 2 || on->ranks == 4 || on->ranks == 8 || (many && !is_chip("Ascend910B")),
      "world_size is ", on->ranks, "; allowed on ", chip().name,
      is_chip("Ascend910B") ? ": 2, 4, 8" : ": 2, 4, 8, 16, 32");
  product.check_arguments(out);
  rule("matmul_sharded.output", [&] {
    if (product.quantized()) one_of("out", out, kHalves);
    else same_dtype("out", out, "x1", product.x1);
  });
  return on;
}

void check_zero(const Opt<Tensor>& bias) {
  rule("matmul_sharded.bias-values", absent(bias) || !at::any(*bias != 0).item<bool>(),
      "bias has values other than 0, which are not supported");
}

Computation gather_product(const Product& product, const Opt<Tensor>& x1_scale, const Text& hcom,
    const Tensor& out, const Tensor& all) {
  const auto on = sharded(product, hcom, out);
  const auto& x1 = product.x1;
  shape("out", out, {x1.size(0) * on->ranks, product.x2.size(1)});
  if (all.numel()) shape("gather_out", all, {x1.size(0) * on->ranks, x1.size(1)});
  if (!absent(x1_scale)) shape("x1_scale", *x1_scale, {x1.size(0), 1});
  on->claim(hccl::kAllGatherMatmul);
  return [=] {
    const auto call = hccl::fused_header(hccl::kAllGatherMatmul, x1.scalar_type(), x1.numel());
    Tensor whole;
    auto with = product;
    hccl::fused(*on, call, [&] {
      check_zero(product.bias);
      hccl::check_same_on_all_ranks(
          *on, call, {{"m", x1.size(0)}, {"whether x1_scale is given", !absent(x1_scale)}});
      whole = hccl::gathered(*on, call, x1).view({-1, x1.size(1)});
      if (!absent(x1_scale)) with.pertoken = hccl::gathered(*on, call, *x1_scale);
    });
    if (all.numel()) all.copy_(whole);
    out.copy_(with.values(whole));
  };
}

Computation product_scatter(const Product& product, const Text& hcom, const Tensor& out) {
  const auto on = sharded(product, hcom, out);
  rule("matmul_sharded.rows", [&] { multiple("m", product.x1.size(0), on->ranks); });
  shape("out", out, {product.x1.size(0) / on->ranks, product.x2.size(1)});
  on->claim(hccl::kMatmulReduceScatter);
  return [=] {
    const auto partial = product.values().to(out.scalar_type());
    const auto result = at::empty(out.sizes(), out.options());
    auto call = hccl::fused_header(hccl::kMatmulReduceScatter, out.scalar_type(), out.numel());
    call.op = hccl::kSum;
    hccl::fused(*on, call, [&] {
      check_zero(product.bias);
      hccl::Counts counts(on->ranks, call.count), starts;
      for (int i = 0; i < on->ranks; ++i) starts.push_back(i * call.count);
      hccl::reduce_scatter(*on, call, partial.data_ptr(), counts, starts, result.data_ptr());
    });
    out.copy_(result);
  };
}

}  // namespace

CHECKED(aclnnAllGatherMatmul,
    (Tensor x1, Tensor x2, Opt<Tensor> bias, Text hcom, int64_t gather_index, int64_t comm_turn,
        int64_t, Tensor out, Tensor gather_out),
    { return gather_product({x1, x2, bias, {}, {}, {}}, {}, hcom, out, gather_out); })
CHECKED(aclnnAllGatherMatmulV2,
    (Tensor x1, Tensor x2, Opt<Tensor> bias, Opt<Tensor> x1_scale, Opt<Tensor> x2_scale,
        Opt<Tensor>, int64_t, Text hcom, int64_t gather_index, int64_t comm_turn, int64_t, int64_t,
        Text comm_mode, Tensor out, Tensor gather_out, Opt<Tensor>),
    { return gather_product({x1, x2, bias, x2_scale, {}, {}}, x1_scale, hcom, out, gather_out); })
CHECKED(aclnnMatmulReduceScatter,
    (Tensor x1, Tensor x2, Opt<Tensor> bias, Text hcom, Text reduce_op, int64_t comm_turn, int64_t,
        Tensor out),
    { return product_scatter({x1, x2, bias, {}, {}, {}}, hcom, out); })
CHECKED(aclnnMatmulReduceScatterV2,
    (Tensor x1, Tensor x2, Opt<Tensor> bias, Opt<Tensor> x1_scale, Opt<Tensor> x2_scale,
        Opt<Tensor>, int64_t, Text hcom, Text reduce_op, int64_t comm_turn, int64_t, int64_t,
        Text comm_mode, Tensor out, Opt<Tensor>),
    { return product_scatter({x1, x2, bias, x2_scale, x1_scale, {}}, hcom, out); })

// Barrier of all ranks (op-plugin's DistributeBarrierOpApi.cpp and test_distribute_barrier.py).
// x_ref orders later operators after it.
CHECKED(aclnnDistributeBarrierV2,
    (Tensor x_ref, Opt<Tensor> time_out, Opt<Tensor> elastic_info, Text group, int64_t world_size),
    {
      require(absent(time_out), "time_out is given; what it means is not documented");
      mc2::reserved("elastic_info", elastic_info);
      const auto on = hccl::group("group", group);
      hccl::check_ranks("world_size", world_size, *on);
      COMPUTE {
        const auto call = hccl::fused_header(hccl::kDistributeBarrier, at::kChar, 0);
        hccl::fused(*on, call, [&] { hccl::barrier(*on, call); });
      };
    })
CHECKED(aclnnDistributeBarrier, (Tensor x_ref, Text group, int64_t world_size),
    { return body_aclnnDistributeBarrierV2(x_ref, {}, {}, group, world_size); })
