// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// All pairs of ranks are connected, so each collective takes one step, or two: large reductions are
// a reduce-scatter and an all-gather. All ranks reduce in the same order, that of the ranks (or of
// core/jitter.h), so results are bitwise identical on all of them and in all runs.
#include "collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "core/jitter.h"

namespace emu::hccl {
namespace {

constexpr uint64_t kSmall = 64 << 10;  // bytes up to which one step is faster than two
constexpr int64_t kBlock =
    16 << 10;  // elements per reduction call: fits the caches, below ATen's threshold for threads

void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes && to != from) std::memmove(to, from, bytes);
}

void accumulate(at::Tensor& into, const at::Tensor& value, int op) {
  switch (op) {
    case kSum: into.add_(value); return;
    case kProd: into.mul_(value); return;
    case kMax: at::maximum_out(into, into, value); return;
    case kMin: at::minimum_out(into, into, value); return;
  }
}

uint64_t size_of(const Header& call) { return data_type(call.type).bytes; }
char* at_element(void* base, uint64_t index, uint64_t size) {
  return static_cast<char*>(base) + index * size;
}

std::vector<Part> parts(void* base, const Counts& counts, const Counts& starts, uint64_t size) {
  std::vector<Part> out;
  for (size_t i = 0; i < counts.size(); ++i)
    out.push_back({at_element(base, starts[i], size), counts[i] * size});
  return out;
}

// Equal parts; the first ones may have one element more.
void divide(uint64_t count, int ranks, Counts& counts, Counts& starts) {
  uint64_t start = 0;
  for (int i = 0; i < ranks; ++i) {
    counts.push_back(count / ranks + (static_cast<uint64_t>(i) < count % ranks));
    starts.push_back(start);
    start += counts.back();
  }
}

// Reduce-scatter: sends each rank its part of `send` and reduces the received parts with this
// rank's own.
void reduce_part(Communicator& on, const Header& call, void* send, const Counts& counts,
    const Counts& starts, void* receive) {
  const uint64_t size = size_of(call), bytes = counts[on.rank] * size;
  char* space = on.scratch(bytes * on.ranks);
  std::vector<Part> in(on.ranks);
  std::vector<const void*> values(on.ranks);
  for (int i = 0; i < on.ranks; ++i) {
    in[i] = {space + i * bytes, bytes};
    values[i] = i == on.rank ? at_element(send, starts[i], size) : in[i].data;
  }
  on.exchange(call, parts(send, counts, starts, size), in);
  reduce(receive, values, counts[on.rank], call.type, call.op);
}

}  // namespace

void reduce(void* out, const std::vector<const void*>& ranks, uint64_t count, int type, int op) {
  const at::ScalarType scalar = *data_type(type).scalar;
  const uint64_t size = data_type(type).bytes;
  const auto order = jitter::order_of(ranks.size());
  c10::InferenceMode no_inference(false);
  at::AutoDispatchBelowADInplaceOrView kernels_only;
  for (uint64_t start = 0; start < count; start += kBlock) {
    const int64_t length = static_cast<int64_t>(std::min<uint64_t>(kBlock, count - start));
    const auto view = [&](const void* base) {
      return at::from_blob(
          static_cast<char*>(const_cast<void*>(base)) + start * size, {length}, scalar);
    };
    // In the type: HcommLocalReduceOnThread, of which algorithms are made, reduces memory of
    // `dataType` into memory of it.
    auto total = view(ranks[order[0]]).clone();
    for (size_t i = 1; i < ranks.size(); ++i) accumulate(total, view(ranks[order[i]]), op);
    view(out).copy_(total);
  }
}

void barrier(Communicator& on, const Header& call) { on.exchange(call, {}, {}); }

void all_reduce(Communicator& on, const Header& call, void* send, void* receive) {
  const uint64_t size = size_of(call), bytes = call.count * size;
  Counts counts, starts;
  if (bytes > kSmall) {
    divide(call.count, on.ranks, counts, starts);
    reduce_part(on, call, send, counts, starts, at_element(receive, starts[on.rank], size));
    const auto all = parts(receive, counts, starts, size);
    on.exchange(call, std::vector<Part>(on.ranks, all[on.rank]), all);
    return;
  }
  char* space = on.scratch(bytes * on.ranks);
  std::vector<Part> in(on.ranks);
  std::vector<const void*> values(on.ranks, send);
  for (int i = 0; i < on.ranks; ++i) {
    in[i] = {space + i * bytes, bytes};
    if (i != on.rank) values[i] = in[i].data;
  }
  on.exchange(call, std::vector<Part>(on.ranks, {send, bytes}), in);
  reduce(receive, values, call.count, call.type, call.op);
}

void reduce(Communicator& on, const Header& call, void* send, void* receive) {
  // A reduce-scatter in which the root's part is everything.
  Counts counts(on.ranks), starts(on.ranks);
  counts[call.root] = call.count;
  reduce_part(on, call, send, counts, starts, receive);
}

void reduce_scatter(Communicator& on, const Header& call, void* send, const Counts& counts,
    const Counts& starts, void* receive) {
  reduce_part(on, call, send, counts, starts, receive);
}

void all_gather(Communicator& on, const Header& call, void* send, void* receive,
    const Counts& counts, const Counts& starts) {
  const auto in = parts(receive, counts, starts, size_of(call));
  copy(in[on.rank].data, send, in[on.rank].bytes);
  on.exchange(call, std::vector<Part>(on.ranks, in[on.rank]), in);
}

void broadcast(Communicator& on, const Header& call, void* buffer) {
  const Part whole{buffer, call.count * size_of(call)};
  std::vector<Part> out(on.ranks), in(on.ranks);
  if (on.rank == static_cast<int>(call.root)) out.assign(on.ranks, whole);
  else in[call.root] = whole;
  on.exchange(call, out, in);
}

void scatter(Communicator& on, const Header& call, void* send, void* receive) {
  const uint64_t bytes = call.count * size_of(call);
  std::vector<Part> out(on.ranks), in(on.ranks);
  if (on.rank == static_cast<int>(call.root)) {
    for (int i = 0; i < on.ranks; ++i) out[i] = {static_cast<char*>(send) + i * bytes, bytes};
    copy(receive, out[on.rank].data, bytes);
  } else {
    in[call.root] = {receive, bytes};
  }
  on.exchange(call, out, in);
}

void all_to_all(Communicator& on, const Header& call, void* send, const Counts& send_counts,
    const Counts& send_starts, void* receive, const Counts& receive_counts,
    const Counts& receive_starts) {
  const uint64_t size = size_of(call);
  const auto out = parts(send, send_counts, send_starts, size),
             in = parts(receive, receive_counts, receive_starts, size);
  if (out[on.rank].bytes != in[on.rank].bytes) {
    throw TransferError(kParameter, text("this rank sends itself ", send_counts[on.rank],
                                        " elements and expects ", receive_counts[on.rank]));
  }
  copy(in[on.rank].data, out[on.rank].data, out[on.rank].bytes);
  on.exchange(call, out, in);
}

}  // namespace emu::hccl
