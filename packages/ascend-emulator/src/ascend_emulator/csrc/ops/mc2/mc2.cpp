// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "mc2.h"

#include <cstring>

#include "core/device.h"
#include "hccl/api.h"

namespace emu::hccl {
namespace {

int type_code(at::ScalarType type) {
  for (int code = 0; code < 18; ++code) {
    if (code == 12 || code == 13) continue;  // unassigned
    if (data_type(code).scalar == type) return code;
  }
  raise(kOpParam, {type, " is no type that HCCL transfers"});
}

}  // namespace

std::shared_ptr<Communicator> group(const char* argument, const std::string& name) {
  // "字符串长度范围为[1,128)" (torch_npu's documentation of npu_moe_distribute_dispatch_v2).
  require(!name.empty() && name.size() < 128, argument, " has ", name.size(),
      " characters; allowed: 1 to 127");
  auto found = named(argument, name);
  check(
      !found->error(), kOpFailed, "the communicator ", name, " failed earlier: ", found->message());
  on_failure([found](const std::string& reason) { found->abandon(reason); });
  return found;
}

void check_ranks(const char* argument, int64_t given, const Communicator& on) {
  require(given == on.ranks, argument, " is ", given, "; the communicator ", on.name, " has ",
      on.ranks, " ranks");
}

Header fused_header(CallKind kind, at::ScalarType type, int64_t count) {
  Header made;
  made.kind = kind;
  made.type = static_cast<uint8_t>(type_code(type));
  made.count = static_cast<uint64_t>(count);
  return made;
}

void fused(Communicator& on, const Header& call, const std::function<void()>& body) {
  on.started();
  try {
    on.perform(call, body);
  } catch (...) {
    on.finished();
    throw;
  }
  on.finished();
}

void check_same_on_all_ranks(
    Communicator& on, const Header& call, const std::vector<RankValue>& values) {
  std::vector<int64_t> own;
  for (const auto& each : values) own.push_back(each.value);
  const uint64_t bytes = own.size() * sizeof(int64_t);
  std::vector<std::vector<int64_t>> theirs(on.ranks, std::vector<int64_t>(own.size()));
  std::vector<Part> in;
  for (auto& each : theirs) in.push_back({each.data(), bytes});
  on.exchange(call, std::vector<Part>(on.ranks, {own.data(), bytes}), in);
  for (int peer = 0; peer < on.ranks; ++peer) {
    if (peer == on.rank) continue;
    for (size_t i = 0; i < own.size(); ++i) {
      if (theirs[peer][i] == own[i]) continue;
      throw TransferError(
          kParameter, text(values[i].name, " is ", own[i], " on this rank and ", theirs[peer][i],
                          " on rank ", peer, "; it must be the same on all ranks"));
    }
  }
}

void exchange(Communicator& on, const Header& call, const std::vector<at::Tensor>& out,
    const std::vector<at::Tensor>& in) {
  const auto parts = [](const std::vector<at::Tensor>& tensors) {
    std::vector<Part> made;
    for (const auto& each : tensors)
      made.push_back({each.numel() ? each.data_ptr() : nullptr, each.nbytes()});
    return made;
  };
  const auto& own = out[on.rank];
  check(own.nbytes() == in[on.rank].nbytes(), kOpFailed, "this rank sends itself ", own.nbytes(),
      " bytes and expects ", in[on.rank].nbytes());
  if (own.numel()) std::memcpy(in[on.rank].data_ptr(), own.data_ptr(), own.nbytes());
  on.exchange(call, parts(out), parts(in));
}

at::Tensor gathered(Communicator& on, const Header& call, const at::Tensor& own) {
  auto shape = own.sizes().vec();
  shape.insert(shape.begin(), on.ranks);
  const auto all = at::empty(shape, own.options());
  const auto straight = own.contiguous();
  exchange(on, call, std::vector<at::Tensor>(on.ranks, straight), all.unbind(0));
  return all;
}

}  // namespace emu::hccl
