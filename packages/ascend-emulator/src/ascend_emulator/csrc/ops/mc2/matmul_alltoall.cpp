// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matrix products fused with an all-to-all: npu_alltoallv_gmm, npu_gmm_alltoallv,
// npu_all_to_all_matmul, npu_matmul_all_to_all. Semantics and limits: torch_npu's documentation of
// these (op-plugin's docs/zh/custom_APIs/torch_npu, BSD), op-plugin's test_alltoallv_gmm.py and
// test_gmm_alltoallv.py.
#include "moe_distribute.h"

using namespace emu;
using mc2::absent;

namespace {

Tensor product(const Tensor& a, const Tensor& b) {
  return at::matmul(a.to(at::kFloat), b.to(at::kFloat));
}

// Expert tokens of all ranks. Counts and communicated rows are ordered by [rank][local expert],
// rows of the grouped matmul by [expert][rank].
struct Grouped {
  Tensor gmm_x, gmm_weight;
  Opt<Tensor> send_tensor, receive_tensor, mm_x, mm_weight;
  Text hcom, comm_mode;
  int64_t ranks;
  Ints send, receive;
  bool turned, mm_turned, permutes = false;
  Tensor y;
  Opt<Tensor> mm_y, permuted;

  int64_t experts() const { return gmm_weight.size(0); }
  Tensor matrix(int64_t expert) const {
    return turned ? gmm_weight[expert].t() : gmm_weight[expert];
  }
  static int64_t sum(const Ints& counts) {
    int64_t total = 0;
    for (const int64_t each : counts) total += each;
    return total;
  }

  std::shared_ptr<hccl::Communicator> check_arguments(bool exchanges_first) const {
    const auto on = hccl::group("hcom", hcom);
    hccl::check_ranks("ep_world_size", ranks, *on);
    require(absent(send_tensor) && absent(receive_tensor),
        "send_counts_tensor or recv_counts_tensor is given; None is allowed");
    within("the number of experts x ep_world_size", experts() * ranks, int64_t{1}, int64_t{256});
    const auto one = matrix(0);
    require(one.size(0) == gmm_x.size(1), "gmm_x has ", gmm_x.size(1), " columns and a gmm_weight ",
        one.size(0), " rows");
    within("N1", one.size(1), 1, 65535);
    for (const auto* counts : {&send, &receive}) {
      const char* name = counts == &send ? "send_counts" : "recv_counts";
      require(static_cast<int64_t>(counts->size()) == experts() * ranks, name, " has ",
          counts->size(), " elements; it must have ", experts() * ranks);
      for (const int64_t each : *counts) within(name, each, int64_t{0}, int64_t{52428800});
    }
    require(sum(send) == gmm_x.size(0), "send_counts add up to ", sum(send), "; gmm_x has ",
        gmm_x.size(0), " rows");
    shape("gmm_y", y, {sum(receive), one.size(1)});
    const int64_t bytes = gmm_x.size(0) * one.size(exchanges_first ? 0 : 1) * gmm_x.element_size();
    require(bytes >= 2 << 20, "this rank communicates ", bytes, " bytes; it must be at least 2 MB");
    if (absent(mm_x) && absent(mm_weight)) return on;
    require(!absent(mm_x) && !absent(mm_weight) && mm_y, "mm_x and mm_weight are needed together");
    require(mm_weight->size(mm_turned ? 1 : 0) == mm_x->size(1), "mm_x has shape ", mm_x->sizes(),
        " and mm_weight ", mm_weight->sizes());
    within("N2", mm_weight->size(mm_turned ? 0 : 1), 1, 65535);
    return on;
  }

  // Permutes rows from [rank][expert] to [expert][rank], or back.
  Tensor order(const Ints& counts, bool by_expert) const {
    std::vector<int64_t> starts(counts.size());
    const auto place = [&](int64_t rank, int64_t expert) { return rank * experts() + expert; };
    std::vector<int64_t> out;
    int64_t next = 0;
    const auto each = [&](auto&& use) {
      for (int64_t i = 0; i < (by_expert ? ranks : experts()); ++i)
        for (int64_t j = 0; j < (by_expert ? experts() : ranks); ++j)
          use(by_expert ? place(i, j) : place(j, i));
    };
    each([&](int64_t at) {
      starts[at] = next;
      next += counts[at];
    });
    const auto other = [&](auto&& use) {
      for (int64_t i = 0; i < (by_expert ? experts() : ranks); ++i)
        for (int64_t j = 0; j < (by_expert ? ranks : experts()); ++j)
          use(by_expert ? place(j, i) : place(i, j));
    };
    other([&](int64_t at) {
      for (int64_t row = 0; row < counts[at]; ++row) out.push_back(starts[at] + row);
    });
    return at::tensor(out, at::kLong);
  }

  // Grouped matmul of rows ordered by [expert][rank].
  Tensor products(const Tensor& rows, const Ints& counts) const {
    std::vector<Tensor> parts;
    int64_t first = 0;
    for (int64_t expert = 0; expert < experts(); ++expert) {
      int64_t number = 0;
      for (int64_t i = 0; i < ranks; ++i) number += counts[i * experts() + expert];
      parts.push_back(product(rows.narrow(0, first, number), matrix(expert)));
      first += number;
    }
    return at::concat(parts).to(gmm_x.scalar_type());
  }

  Tensor exchanged(hccl::Communicator& on, hccl::CallKind kind, const Tensor& rows) const {
    const auto call = hccl::fused_header(kind, rows.scalar_type(), rows.size(1));
    std::vector<Tensor> out, in;
    const auto straight = rows.contiguous();
    const auto result = at::empty({sum(receive), rows.size(1)}, rows.options());
    int64_t from = 0, to = 0;
    for (int64_t i = 0; i < ranks; ++i) {
      const auto part = [&](const Ints& counts) {
        return sum({counts.begin() + i * experts(), counts.begin() + (i + 1) * experts()});
      };
      out.push_back(straight.narrow(0, from, part(send)));
      in.push_back(result.narrow(0, to, part(receive)));
      from += part(send);
      to += part(receive);
    }
    hccl::fused(on, call, [&] { hccl::exchange(on, call, out, in); });
    return result;
  }

  void shared() const {
    if (!absent(mm_x)) mm_y->copy_(product(*mm_x, mm_turned ? mm_weight->t() : *mm_weight));
  }
};

Computation exchange_first(const Grouped& one) {
  const auto on = one.check_arguments(true);
  require(!one.permutes || one.permuted, "permute_out is None; with permute_out_flag it is needed");
  on->claim(hccl::kAllToAllGrouped);
  return [=] {
    const auto rows = one.exchanged(*on, hccl::kAllToAllGrouped, one.gmm_x)
                          .index_select(0, one.order(one.receive, true));
    if (one.permutes) one.permuted->copy_(rows);
    one.y.copy_(one.products(rows, one.receive));
    one.shared();
  };
}

Computation exchange_last(const Grouped& one) {
  const auto on = one.check_arguments(false);
  on->claim(hccl::kGroupedAllToAll);
  return [=] {
    const auto rows = one.products(one.gmm_x, one.send).index_select(0, one.order(one.send, false));
    one.y.copy_(one.exchanged(*on, hccl::kGroupedAllToAll, rows));
    one.shared();
  };
}

// Arguments of the operators, in their order.
struct FirstArguments : Grouped {
  FIELDS(gmm_x, gmm_weight, send_tensor, receive_tensor, mm_x, mm_weight, hcom, ranks, send,
      receive, turned, mm_turned, permutes, y, mm_y, permuted)
};
struct FirstArgumentsV2 : Grouped {
  FIELDS(gmm_x, gmm_weight, send_tensor, receive_tensor, mm_x, mm_weight, hcom, comm_mode, ranks,
      send, receive, turned, mm_turned, permutes, y, mm_y, permuted)
};
struct LastArguments : Grouped {
  FIELDS(gmm_x, gmm_weight, send_tensor, receive_tensor, mm_x, mm_weight, hcom, ranks, send,
      receive, turned, mm_turned, y, mm_y)
};
struct LastArgumentsV2 : Grouped {
  FIELDS(gmm_x, gmm_weight, send_tensor, receive_tensor, mm_x, mm_weight, hcom, comm_mode, ranks,
      send, receive, turned, mm_turned, y, mm_y)
};

}  // namespace

CHECKED(aclnnAlltoAllvGroupedMatMul, (FirstArguments call), { return exchange_first(call); })
CHECKED(aclnnAlltoAllvGroupedMatMulV2, (FirstArgumentsV2 call), { return exchange_first(call); })
CHECKED(aclnnGroupedMatMulAlltoAllv, (LastArguments call), { return exchange_last(call); })
CHECKED(aclnnGroupedMatMulAlltoAllvV2, (LastArgumentsV2 call), { return exchange_last(call); })

namespace {

struct Dense {
  Tensor x1, x2;
  Opt<Tensor> bias;
  Opt<Ints> axes;
  Text hcom, comm_mode;
  bool t1, t2;
  Tensor out;

  std::shared_ptr<hccl::Communicator> check_arguments(const Ints& only_axes) const {
    const auto on = hccl::group("hcom", hcom);
    one_of("world_size", on->ranks, {2, 4, 8, 16});
    require_emulated(
        !t1 && !t2, "transposing flags are not emulated; torch_npu passes transposed views");
    require(x2.numel() > 0, "x2 has shape ", x2.sizes(), "; it must not be empty");
    const auto order = axes.value_or(Ints());
    require(order.empty() || order == only_axes, "all2all_axes is ", listed(order),
        "; allowed: none, or ", listed(only_axes));
    if (absent(bias)) return on;
    one_of("bias", *bias, {x1.scalar_type() == at::kHalf ? at::kHalf : at::kFloat});
    shape("bias", *bias, {x2.size(1)});
    return on;
  }
  Tensor values(const Tensor& left) const {
    const auto result = product(left, x2);
    return (absent(bias) ? result : result + bias->to(at::kFloat)).to(x1.scalar_type());
  }
};

// All-to-all over equal parts of the first dimension.
Tensor transposed(hccl::Communicator& on, hccl::CallKind kind, const Tensor& parts) {
  const auto call = hccl::fused_header(kind, parts.scalar_type(), parts.numel());
  const auto result = at::empty(parts.sizes(), parts.options());
  hccl::fused(
      on, call, [&] { hccl::exchange(on, call, parts.contiguous().unbind(0), result.unbind(0)); });
  return result;
}

Computation all_to_all_first(const Dense& one, const Opt<Tensor>& permuted) {
  const auto on = one.check_arguments({-2, -1});
  const int64_t ranks = on->ranks, rows = one.x1.size(0), hidden = one.x1.size(1);
  multiple("the rows of x1", rows, ranks);
  require(one.x2.size(0) == hidden * ranks, "x2 has ", one.x2.size(0), " rows; it must have ",
      hidden * ranks, ", the columns of x1 times the ranks");
  shape("y", one.out, {rows / ranks, one.x2.size(1)});
  on->claim(hccl::kAllToAllMatmul);
  return [=] {
    const auto left =
        transposed(*on, hccl::kAllToAllMatmul, one.x1.view({ranks, rows / ranks, hidden}))
            .transpose(0, 1)
            .reshape({rows / ranks, hidden * ranks});
    if (permuted) permuted->copy_(left);
    one.out.copy_(one.values(left));
  };
}

Computation all_to_all_last(const Dense& one) {
  const auto on = one.check_arguments({-1, -2});
  const int64_t ranks = on->ranks, rows = one.x1.size(0), columns = one.x2.size(1);
  multiple("the columns of x2", columns, ranks);
  require(one.x2.size(0) == one.x1.size(1), "x1 has ", one.x1.size(1), " columns and x2 ",
      one.x2.size(0), " rows");
  shape("y", one.out, {rows * ranks, columns / ranks});
  on->claim(hccl::kMatmulAllToAll);
  return [=] {
    const auto parts = one.values(one.x1).view({rows, ranks, columns / ranks}).transpose(0, 1);
    one.out.copy_(transposed(*on, hccl::kMatmulAllToAll, parts).reshape(one.out.sizes()));
  };
}

// Arguments of the versions, in their order.
struct DenseV1 : Dense {
  FIELDS(x1, x2, bias, axes, hcom, t1, t2, out)
};
struct DenseV2 : Dense {
  FIELDS(x1, x2, bias, axes, hcom, comm_mode, t1, t2, out)
};

}  // namespace

CHECKED(aclnnAlltoAllMatmul, (DenseV1 call, Opt<Tensor> all_to_all_out),
    { return all_to_all_first(call, all_to_all_out); })
CHECKED(aclnnAlltoAllMatmulV2, (DenseV2 call, Opt<Tensor> all_to_all_out),
    { return all_to_all_first(call, all_to_all_out); })
CHECKED(aclnnMatmulAlltoAll, (DenseV1 call), { return all_to_all_last(call); })
CHECKED(aclnnMatmulAlltoAllV2, (DenseV2 call), { return all_to_all_last(call); })
