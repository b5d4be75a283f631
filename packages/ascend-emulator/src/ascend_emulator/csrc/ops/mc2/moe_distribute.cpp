// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of dispatch and combine; see moe_distribute.h.
#include "moe_distribute.h"

#include <cstdlib>
#include <set>

namespace emu::mc2 {

using hccl::RankValue;

void reserved(const char* argument, const Opt<Tensor>& tensor) {
  require(absent(tensor), argument, " is given; it is reserved: None is allowed");
}

Tensor from_ints(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

// What comm_alg "" is on A2: "hierarchy" with these variables, "fullmesh" without.
static bool hierarchy_by_variables() {
  const auto is = [](const char* variable, const char* value) {
    const char* found = std::getenv(variable);
    return found && std::string(found) == value;
  };
  return is_chip("Ascend910B") && is("HCCL_INTRA_PCIE_ENABLE", "1") &&
         is("HCCL_INTRA_ROCE_ENABLE", "0");
}

Experts::Experts(
    Version version, const MoeSettings& at, const Text& given, const SpecialExperts& special)
    : version(version),
      on(hccl::group("group_ep", at.group_ep)),
      experts(at.moe_expert_num),
      shared(at.shared_num),
      shared_ranks(at.shared_rank_num),
      global_tokens(at.global_bs),
      zero(special.zero_num),
      copy(special.copy_num),
      constant(special.const_num),
      algorithm(version != Version::one && given.empty() && hierarchy_by_variables() ? "hierarchy"
                                                                                     : given) {
  const bool a2 = is_chip("Ascend910B"), first = version == Version::one;
  const int64_t ranks = at.ep_world_size;
  using List = std::initializer_list<int64_t>;
  // "模板仅支持tp_world_size为1、共享专家为0的场景".
  require(algorithm != "hierarchy" || shared_ranks == 0, "shared_expert_rank_num is ", shared_ranks,
      "; with comm_alg hierarchy, 0 is allowed");
  if (first)
    one_of("ep_world_size", ranks, a2 ? List{16, 32, 64} : List{8, 16, 32, 64, 128, 144, 256, 288});
  else if (algorithm == "hierarchy" && a2)
    one_of(
        "ep_world_size, with comm_alg hierarchy,", ranks, {int64_t{16}, int64_t{32}, int64_t{64}});
  else if (algorithm == "hierarchy") {
    within("ep_world_size, with comm_alg hierarchy,", ranks, 16, 256);
    multiple("ep_world_size, with comm_alg hierarchy,", ranks, 16);
  } else if (a2) one_of("ep_world_size", ranks, List{2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256});
  else within("ep_world_size", ranks, 2, 768);
  hccl::check_ranks("ep_world_size", ranks, *on);
  require(at.ep_rank_id == on->rank, "ep_rank_id is ", at.ep_rank_id, "; this process is rank ",
      on->rank, " of the communicator ", on->name);
  using Names = std::initializer_list<std::string>;
  if (!first)
    one_of("comm_alg", given,
        a2 ? Names{"", "fullmesh", "hierarchy"}
           : Names{"", "fullmesh_v1", "fullmesh_v2", "hierarchy"});
  if (a2) {
    one_of("shared_expert_rank_num", shared_ranks, {int64_t{0}});
    one_of("const_expert_num", constant, {int64_t{0}});
  }
  if (first) within("shared_expert_num", shared, 0, 1);
  within("shared_expert_rank_num", shared_ranks, int64_t{0}, ranks - 1);
  if (shared_ranks) {
    require(shared > 0 && shared_ranks % shared == 0, "shared_expert_rank_num is ", shared_ranks,
        "; it must be a multiple of shared_expert_num, ", shared);
    if (first)
      require(ranks % shared_ranks == 0, "shared_expert_rank_num is ", shared_ranks,
          "; it must divide ep_world_size, ", ranks);
  } else {
    shared = 0;
  }
  within("moe_expert_num", experts, 1, first || (algorithm == "hierarchy" && !a2) ? 512 : 1024);
  multiple("moe_expert_num", experts, ranks - shared_ranks);
  const int64_t each = experts / (ranks - shared_ranks);
  if (first && a2) within("moe_expert_num / (ep_world_size - shared_expert_rank_num)", each, 1, 24);
  if (!first && !a2) within("the experts of a rank x ep_world_size", each * ranks, 1, 2048);
  for (const auto& [name, number] : {RankValue{"zero_expert_num", zero},
           RankValue{"copy_expert_num", copy}, RankValue{"const_expert_num", constant}}) {
    within(name, number, int64_t{0}, int64_t{0x7ffffffe});
    if (algorithm == "hierarchy")
      require(number == 0, name, " is ", number, "; with comm_alg hierarchy, 0 is allowed");
  }
  within("the number of all experts", all_experts(), int64_t{1}, int64_t{0x7ffffffe});
}

void Experts::check_tokens(
    const Tensor& ids, const Opt<Tensor>& mask, int64_t hidden, bool words) const {
  const bool a2 = is_chip("Ascend910B"), first = version == Version::one,
             levels = algorithm == "hierarchy";
  const int64_t tokens = ids.size(0), choices = ids.size(1);
  within("BS (the rows of expert_ids)", tokens, 1,
      first ? (a2 ? 256 : 512)
      : a2  ? (levels ? 512 : 256)
            : (levels || algorithm == "fullmesh_v2" ? 256 : 512));
  const int64_t most = first && !a2 ? 8 : algorithm == "fullmesh_v2" ? 12 : 16;
  within("K (the columns of expert_ids)", choices, int64_t{1}, std::min(most, all_experts()));
  if (a2) {
    within("H", hidden, 1, words ? 5120 : !first && levels ? 10240 : 7168);
    multiple("H", hidden, 32);
  } else if (first) {
    one_of("H", hidden, {int64_t{7168}});
  } else {
    within("H", hidden, 1024, 8192);
  }
  multiple("global_bs", global_tokens, ranks());
  require(global_tokens >= tokens * ranks(), "global_bs is ", global_tokens, "; with the ", tokens,
      " tokens of this rank it is at least ", tokens * ranks());
  if (absent(mask)) return;
  if (first || (a2 && levels)) reserved("x_active_mask", mask);
  one_of("x_active_mask", *mask, {at::kBool});
  rank("x_active_mask", *mask, 1, levels ? 1 : 2);
  if (mask->dim() == 1) shape("x_active_mask", *mask, {tokens});
  else shape("x_active_mask", *mask, {tokens, choices});
}

// "HCCL通信域缓存区大小" of each operator's documentation. On A2 only HCCL_BUFFSIZE counts, on A3
// also the communicator's own hccl_buffer_size.
void Experts::check_buffer(int64_t tokens, int64_t choices, int64_t hidden, int64_t element) const {
  const bool a2 = is_chip("Ascend910B"), first = version == Version::one;
  constexpr int64_t kMiB = 1 << 20;
  const auto align = [](int64_t to, int64_t value) { return (value + to - 1) / to * to; };
  const int64_t most = global_tokens / ranks(), local = experts / (ranks() - shared_ranks);
  int64_t bytes;
  if (first && hierarchy_by_variables()) {
    bytes = experts * tokens * (hidden * element + 4 * align(8, choices) * 4) + 104 * kMiB;
  } else if (!first && algorithm == "hierarchy") {
    const int64_t row = hidden * element + 4 * align(8, choices) * 4;
    bytes = a2 ? (experts + ranks() / 4) * align(512, most * row) + 8 * kMiB
               : experts * tokens * row + (4 + 400) * kMiB;
  } else if (a2) {
    const int64_t row = element == 4 ? hidden * 4 + 32 : hidden * 2;
    bytes = 2 * (tokens * ranks() * std::min(local, choices) * row + 2 * kMiB);
  } else if (first) {
    bytes = 2 * tokens * 2 * (hidden + 128) * (ranks() * local + choices + 1) + 2 * kMiB;
  } else {
    const int64_t row = align(32, 2 * hidden) + 64,
                  slot = algorithm == "fullmesh_v2" ? align(480, row) / 480 * 512 : align(512, row);
    bytes = std::max(2 * kMiB,
        2 * (local * most * ranks() * slot + (choices + shared) * most * align(512, 2 * hidden)));
  }
  const auto has = static_cast<int64_t>(a2 ? hccl::buffer_size() : on->options.buffer_size);
  require(bytes <= has * kMiB, "the buffer of communicator ", on->name, " has ", has, " MiB; with ",
      tokens, " tokens of ", hidden, " values, ", choices, " experts each, ", experts,
      " experts and ", ranks(), " ranks at least ", (bytes + kMiB - 1) / kMiB,
      " are needed: set HCCL_BUFFSIZE", a2 ? "" : " or the group's hccl_buffer_size");
}

int64_t Experts::most_rows(int64_t choices) const {
  if (on->rank >= shared_ranks) return global_tokens * std::min(local(on->rank), choices);
  const int64_t replicas = shared_ranks / shared;
  return global_tokens / ranks() * ((ranks() + replicas - 1) / replicas);
}

void Experts::check_same_on_all_ranks(
    const hccl::Header& call, int64_t choices, std::initializer_list<RankValue> more) const {
  std::vector<RankValue> all{{"moe_expert_num", experts}, {"shared_expert_num", shared},
      {"shared_expert_rank_num", shared_ranks}, {"global_bs", global_tokens}, {"K", choices},
      {"zero_expert_num", zero}, {"copy_expert_num", copy}, {"const_expert_num", constant}};
  all.insert(all.end(), more);
  hccl::check_same_on_all_ranks(*on, call, all);
}

Tensor active_choices(const Tensor& ids, const Opt<Tensor>& mask) {
  if (absent(mask)) return at::ones(ids.sizes(), at::kBool);
  if (mask->dim() == 2) return mask->contiguous();
  const auto active = mask->to(at::kLong);
  require(mask->numel() < 2 || !at::any(active.diff() > 0).item<bool>(),
      "x_active_mask has true after false; all true come first");
  return mask->unsqueeze(1).expand(ids.sizes()).contiguous();
}

std::vector<std::vector<Slots>> Experts::route(const Tensor& ids, const Opt<Tensor>& mask) const {
  std::vector<std::vector<Slots>> out(ranks());
  for (int64_t i = 0; i < ranks(); ++i) out[i].resize(local(i));
  const auto chosen = ids.contiguous(), active = active_choices(ids, mask);
  // A rank has at most global_bs / ranks tokens; with different numbers per rank, all tokens are
  // active.
  require(absent(mask) || at::all(active).item<bool>() || global_tokens == ids.size(0) * ranks(),
      "x_active_mask leaves tokens out while the ranks have different numbers of tokens "
      "(global_bs); then all tokens must take "
      "part");
  const auto* id = chosen.const_data_ptr<int32_t>();
  const auto* on_way = active.const_data_ptr<bool>();
  const int64_t tokens = ids.size(0), choices = ids.size(1),
                each = experts / (ranks() - shared_ranks);
  const int64_t replicas = shared ? shared_ranks / shared : 0;
  for (int64_t token = 0; token < tokens; ++token) {
    bool any = false;
    std::set<int32_t> seen;
    for (int64_t k = 0; k < choices; ++k) {
      if (!on_way[token * choices + k]) continue;
      any = true;
      const int32_t expert = id[token * choices + k];
      require(expert >= 0 && expert < all_experts(), "expert_ids[", token, "][", k, "] is ", expert,
          "; allowed: 0 to ", all_experts() - 1);
      require(seen.insert(expert).second, "expert_ids[", token, "] has ", expert,
          " twice; the experts of a token must differ");
      if (expert < experts) out[shared_ranks + expert / each][expert % each].push_back({token, k});
    }
    // Each rank uses its own replica of a shared expert (test_moe_distribute_dispatch_v2.py).
    for (int64_t s = 0; any && s < shared; ++s)
      out[s * replicas + on->rank % replicas][0].push_back({token, choices + s});
  }
  return out;
}

}  // namespace emu::mc2
