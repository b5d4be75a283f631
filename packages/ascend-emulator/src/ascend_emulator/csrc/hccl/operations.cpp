// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// HCCL's operations. Arguments are checked at the call; the operation runs as a task of the stream.
// Signatures: see types.h.
#include <algorithm>
#include <utility>

#include "core/device.h"
#include "core/recheck.h"
#include "core/stream.h"
#include "core/trace.h"
#include "api.h"
#include "collectives.h"

using namespace emu;
using namespace emu::hccl;

namespace {

// Device memory of a call.
struct Buffer {
  const char* name;
  const void* address;
  uint64_t bytes;
};

struct Operation {
  std::shared_ptr<Communicator> on;
  void* stream;
  Header call;
  std::function<void()> body;       // of a collective
  std::vector<PointToPoint> items;  // of point-to-point calls
  std::vector<Buffer> buffers{};
  Recheck memory{};
  std::shared_ptr<Ticket> ticket{};
  fault::Kind fault = fault::Kind::none;
};

// Calls of this thread between HcclGroupStart and HcclGroupEnd.
thread_local int group_depth = 0;
thread_local std::vector<Operation> group;
// Of this thread's current call.
thread_local std::vector<Buffer> buffers;

void check_memory(const Operation& operation) {
  operation.memory.verify([&] {
    for (const auto& each : operation.buffers)
      operation.memory.check(each.name, each.address, each.bytes);
  });
}

// Adjacent point-to-point calls are one step, so that their order cannot deadlock.
void run(const std::vector<Operation>& operations) {
  for (size_t i = 0; i < operations.size(); ++i) {
    const auto& first = operations[i];
    std::vector<Ticket*> tickets;
    if (first.ticket) tickets.push_back(first.ticket.get());
    auto fault = first.fault;
    auto items = first.items;
    const auto begin = i;
    for (; !first.body && i + 1 < operations.size() && !operations[i + 1].body; ++i) {
      const auto& next = operations[i + 1];
      items.insert(items.end(), next.items.begin(), next.items.end());
      if (next.ticket) tickets.push_back(next.ticket.get());
      if (fault == fault::Kind::none) fault = next.fault;
    }
    if (fault == fault::Kind::hang) hang();
    first.on->perform(
        first.call,
        [&] {
          for (auto at = begin; at <= i; ++at) check_memory(operations[at]);
          if (first.body) first.body();
          else first.on->exchange(items);
        },
        tickets, fault);
  }
}

// Bytes over this rank's links, for the trace.
double link_bytes(const Operation& operation) {
  const auto& on = operation.on;
  const auto& call = operation.call;
  const double bytes = static_cast<double>(call.count * data_type(call.type).bytes),
               others = on->ranks - 1;
  double sum = 0;
  switch (call.kind) {
    case kAllReduce: return 2 * bytes * others / on->ranks;
    case kAllGather:
    case kReduceScatter:
    case kAllToAll: return bytes * others;
    case kSend:
    case kReceive:
      for (const auto& each : operation.items) sum += static_cast<double>(each.header.bytes);
      return sum;
    default: return bytes;
  }
}

void submit(std::vector<Operation> operations) {
  const auto stream = stream_at(operations.front().stream);
  Task task{kind_name(operations.front().call.kind), {}, emu::Kind::collective, /*blocks=*/true};
  if (trace_enabled()) {
    for (const auto& each : operations) task.work.link += link_bytes(each);
    task.work.bytes = 2 * task.work.link;
    task.work.ranks = operations.front().on->ranks;
    task.work.shapes = operations.front().call.describe();
  }
  if (!stream->capture) {
    for (auto& each : operations) {
      std::set<int> lanes;
      for (const auto& item : each.items) lanes.insert(Ticket::lane(item));
      if (each.body) lanes.insert(Ticket::kCollectives);
      each.ticket = std::make_shared<Ticket>(each.on, std::move(lanes));
    }
  }
  task.run = [operations = std::move(operations)] { run(operations); };
  stream->submit(std::move(task));
}

void issue(Operation operation) {
  if (operation.on->error())
    refuse_call(static_cast<Code>(operation.on->error()), operation.on->message());
  const int device = stream_at(operation.stream)->device;
  check(device == operation.on->device, kInvalidParam, "the stream is of NPU ", device,
      ", the communicator of NPU ", operation.on->device);
  operation.on->claim(operation.call.kind);
  if (fault::armed()) operation.fault = fault::pending();
  operation.buffers = std::move(buffers);
  if (group_depth) group.push_back(std::move(operation));
  else submit({std::move(operation)});
}

void issue(std::shared_ptr<Communicator> on, void* stream, const Header& call,
    std::function<void()> body) {
  issue({std::move(on), stream, call, std::move(body), {}});
}

// Begins a call.
std::shared_ptr<Communicator> communicator_of(void* handle) {
  buffers.clear();
  return communicator(handle);
}

void* buffer(const void* address, uint64_t bytes, const char* name) {
  if (!bytes) return nullptr;
  if (!address) refuse_call(kNullPointer, name, " is null");
  if (!is_device(address)) refuse_call(kParameter, name, " is not device memory: ", address);
  buffers.push_back({name, address, bytes});
  try {
    return to_kernel(address, bytes);
  } catch (const Error& error) { refuse_call(kParameter, name, ": ", error.what()); }
}

// Ensures that sizes in bytes do not overflow.
uint64_t checked_count(const char* name, uint64_t count) {
  if (count >> 40)
    refuse_call(kParameter, name, " is ", count, "; no NPU holds that many elements");
  return count;
}

uint64_t bytes_of(uint64_t count, int type) {
  return checked_count("the count", count) * data_type(type).bytes;
}

Header header(CallKind kind, uint64_t count, int type, int op = 0xff, uint32_t root = kNone) {
  Header made;
  made.kind = kind;
  made.type = static_cast<uint8_t>(type);
  made.op = static_cast<uint8_t>(op);
  made.root = root;
  made.count = checked_count("the count", count);
  return made;
}

Counts counts_of(const void* array, const char* name, const Communicator& on) {
  if (!array) refuse_call(kNullPointer, name, " is null");
  const auto* first = static_cast<const uint64_t*>(array);
  for (int i = 0; i < on.ranks; ++i) checked_count(name, first[i]);
  return {first, first + on.ranks};
}

Counts same(uint64_t count, const Communicator& on) { return Counts(on.ranks, count); }
Counts multiples(uint64_t count, const Communicator& on) {
  Counts out;
  for (int i = 0; i < on.ranks; ++i) out.push_back(i * count);
  return out;
}

// Number of elements that a buffer needs for these counts and displacements.
uint64_t extent(const Counts& counts, const Counts& starts) {
  uint64_t end = 0;
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i]) end = std::max(end, starts[i] + counts[i]);
  return end;
}

PointToPoint item(
    CallKind kind, void* address, uint64_t count, int type, uint32_t peer, const Communicator& on) {
  check_transferable(type);
  rank_within(kind == kSend ? "destRank" : "srcRank", peer, on);
  auto call = header(kind, count, type);
  call.bytes = bytes_of(count, type);
  return {static_cast<int>(peer), call,
      buffer(address, call.bytes, kind == kSend ? "sendBuf" : "recvBuf")};
}

void point_to_point(CallKind kind, void* address, uint64_t count, int type, uint32_t peer,
    void* comm, void* stream) {
  const auto on = communicator_of(comm);
  const auto one = item(kind, address, count, type, peer, *on);
  issue({on, stream, one.header, {}, {one}});
}

void all_to_all_call(CallKind kind, uint64_t count, const void* send_address, Counts send_counts,
    Counts send_starts, int send_type, const void* receive_address, Counts receive_counts,
    Counts receive_starts, int receive_type, std::shared_ptr<Communicator> on, void* stream) {
  check_transferable(send_type);
  check_transferable(receive_type);
  if (send_type != receive_type)
    refuse_call(kParameter, "sendType is ", data_type(send_type).name, ", recvType ",
        data_type(receive_type).name, "; they must be the same");
  const uint64_t size = data_type(send_type).bytes;
  void* send = buffer(send_address, extent(send_counts, send_starts) * size, "sendBuf");
  void* receive = buffer(receive_address, extent(receive_counts, receive_starts) * size, "recvBuf");
  if (send && send == receive)
    refuse_call(kParameter, "sendBuf and recvBuf are the same; they must not be");
  const auto call = header(kind, count, send_type);
  issue(on, stream, call, [=] {
    all_to_all(*on, call, send, send_counts, send_starts, receive, receive_counts, receive_starts);
  });
}

}  // namespace

HCCL_API(computed, HcclAllReduce,
    (void* send, void* receive, uint64_t count, int32_t type, int32_t op, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      check_reducible(type, op);
      const uint64_t bytes = bytes_of(count, type);
      const auto call = header(kAllReduce, count, type, op);
      issue(on, stream, call,
          [=, from = buffer(send, bytes, "sendBuf"), to = buffer(receive, bytes, "recvBuf")] {
            all_reduce(*on, call, from, to);
          });
    })

HCCL_API(computed, HcclReduce,
    (void* send, void* receive, uint64_t count, int32_t type, int32_t op, uint32_t root, void* comm,
        void* stream),
    {
      const auto on = communicator_of(comm);
      check_reducible(type, op);
      rank_within("root", root, *on);
      const uint64_t bytes = bytes_of(count, type);
      void* to = on->rank == static_cast<int>(root) ? buffer(receive, bytes, "recvBuf") : nullptr;
      const auto call = header(kReduce, count, type, op, root);
      issue(on, stream, call,
          [=, from = buffer(send, bytes, "sendBuf")] { reduce(*on, call, from, to); });
    })

HCCL_API(computed, HcclReduceScatter,
    (void* send, void* receive, uint64_t count, int32_t type, int32_t op, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      check_reducible(type, op);
      const uint64_t bytes = bytes_of(count, type);
      void* from = buffer(send, bytes * on->ranks, "sendBuf");
      void* to = buffer(receive, bytes, "recvBuf");
      const auto call = header(kReduceScatter, count, type, op);
      issue(on, stream, call, [=] {
        reduce_scatter(*on, call, from, same(call.count, *on), multiples(call.count, *on), to);
      });
    })

HCCL_API(computed, HcclReduceScatterV,
    (const void* send, const void* send_counts, const void* send_starts, const void* receive,
        uint64_t count, int32_t type, int32_t op, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      check_reducible(type, op);
      const auto counts = counts_of(send_counts, "sendCounts", *on);
      const auto starts = counts_of(send_starts, "sdispls", *on);
      if (counts[on->rank] != count)
        refuse_call(kParameter, "recvCount is ", count, ", sendCounts[", on->rank, "] ",
            counts[on->rank], "; they must be the same");
      void* from = buffer(send, extent(counts, starts) * data_type(type).bytes, "sendBuf");
      void* to = buffer(receive, bytes_of(count, type), "recvBuf");
      const auto call = header(kReduceScatterV, 0, type, op);
      issue(on, stream, call, [=] { reduce_scatter(*on, call, from, counts, starts, to); });
    })

HCCL_API(computed, HcclAllGather,
    (void* send, void* receive, uint64_t count, int32_t type, void* comm, void* stream), {
      const auto on = communicator_of(comm);
      check_transferable(type);
      const uint64_t bytes = bytes_of(count, type);
      void* from = buffer(send, bytes, "sendBuf");
      void* to = buffer(receive, bytes * on->ranks, "recvBuf");
      const auto call = header(kAllGather, count, type);
      issue(on, stream, call, [=] {
        all_gather(*on, call, from, to, same(call.count, *on), multiples(call.count, *on));
      });
    })

HCCL_API(computed, HcclAllGatherV,
    (const void* send, uint64_t count, const void* receive, const void* receive_counts,
        const void* receive_starts, int32_t type, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      check_transferable(type);
      const auto counts = counts_of(receive_counts, "recvCounts", *on);
      const auto starts = counts_of(receive_starts, "rdispls", *on);
      if (counts[on->rank] != count)
        refuse_call(kParameter, "sendCount is ", count, ", recvCounts[", on->rank, "] ",
            counts[on->rank], "; they must be the same");
      void* from = buffer(send, bytes_of(count, type), "sendBuf");
      void* to = buffer(receive, extent(counts, starts) * data_type(type).bytes, "recvBuf");
      const auto call = header(kAllGatherV, 0, type);
      issue(on, stream, call, [=] { all_gather(*on, call, from, to, counts, starts); });
    })

HCCL_API(computed, HcclBroadcast,
    (void* address, uint64_t count, int32_t type, uint32_t root, void* comm, void* stream), {
      const auto on = communicator_of(comm);
      check_transferable(type);
      rank_within("root", root, *on);
      void* whole = buffer(address, bytes_of(count, type), "buf");
      const auto call = header(kBroadcast, count, type, 0xff, root);
      issue(on, stream, call, [=] { broadcast(*on, call, whole); });
    })

HCCL_API(computed, HcclScatter,
    (void* send, void* receive, uint64_t count, int32_t type, uint32_t root, void* comm,
        void* stream),
    {
      const auto on = communicator_of(comm);
      check_transferable(type);
      rank_within("root", root, *on);
      const uint64_t bytes = bytes_of(count, type);
      void* from =
          on->rank == static_cast<int>(root) ? buffer(send, bytes * on->ranks, "sendBuf") : nullptr;
      void* to = buffer(receive, bytes, "recvBuf");
      const auto call = header(kScatter, count, type, 0xff, root);
      issue(on, stream, call, [=] { scatter(*on, call, from, to); });
    })

HCCL_API(computed, HcclAlltoAll,
    (const void* send, uint64_t send_count, int32_t send_type, const void* receive,
        uint64_t receive_count, int32_t receive_type, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      if (send_count != receive_count)
        refuse_call(kParameter, "sendCount is ", send_count, ", recvCount ", receive_count,
            "; they must be the same");
      all_to_all_call(kAllToAll, send_count, send, same(send_count, *on),
          multiples(send_count, *on), send_type, receive, same(receive_count, *on),
          multiples(receive_count, *on), receive_type, on, stream);
    })

HCCL_API(computed, HcclAlltoAllV,
    (const void* send, const void* send_counts, const void* send_starts, int32_t send_type,
        const void* receive, const void* receive_counts, const void* receive_starts,
        int32_t receive_type, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      all_to_all_call(kAllToAllV, 0, send, counts_of(send_counts, "sendCounts", *on),
          counts_of(send_starts, "sdispls", *on), send_type, receive,
          counts_of(receive_counts, "recvCounts", *on), counts_of(receive_starts, "rdispls", *on),
          receive_type, on, stream);
    })

// Counts of all ranks as a matrix [from][to]; parts are contiguous.
HCCL_API(computed, HcclAlltoAllVC,
    (const void* send, const void* matrix, int32_t send_type, const void* receive,
        int32_t receive_type, void* comm, void* stream),
    {
      const auto on = communicator_of(comm);
      if (!matrix) refuse_call(kNullPointer, "sendCountMatrix is null");
      const auto* counts = static_cast<const uint64_t*>(matrix);
      for (int i = 0; i < on->ranks * on->ranks; ++i) checked_count("sendCountMatrix", counts[i]);
      const auto starts = [](const Counts& each) {
        Counts out(each.size());
        for (size_t i = 1; i < each.size(); ++i) out[i] = out[i - 1] + each[i - 1];
        return out;
      };
      Counts send_counts(counts + on->rank * on->ranks, counts + (on->rank + 1) * on->ranks);
      Counts receive_counts;
      for (int i = 0; i < on->ranks; ++i)
        receive_counts.push_back(counts[i * on->ranks + on->rank]);
      all_to_all_call(kAllToAllV, 0, send, send_counts, starts(send_counts), send_type, receive,
          receive_counts, starts(receive_counts), receive_type, on, stream);
    })

HCCL_API(computed, HcclSend,
    (void* address, uint64_t count, int32_t type, uint32_t peer, void* comm, void* stream),
    { point_to_point(kSend, address, count, type, peer, comm, stream); })
HCCL_API(computed, HcclRecv,
    (void* address, uint64_t count, int32_t type, uint32_t peer, void* comm, void* stream),
    { point_to_point(kReceive, address, count, type, peer, comm, stream); })

HCCL_API(computed, HcclBatchSendRecv,
    (const SendReceive* batch, uint32_t number, void* comm, void* stream), {
      const auto on = communicator_of(comm);
      if (!batch) refuse_call(kNullPointer, "sendRecvInfo is null");
      if (!number) refuse_call(kParameter, "itemNum is 0");
      std::vector<PointToPoint> items;
      for (uint32_t i = 0; i < number; ++i) {
        const auto& each = batch[i];
        if (each.kind != 0 && each.kind != 1)
          refuse_call(kParameter, "sendRecvInfo[", i, "].sendRecvType is ", each.kind,
              "; allowed: 0 (send), 1 (receive)");
        items.push_back(item(
            each.kind == 0 ? kSend : kReceive, each.buffer, each.count, each.type, each.peer, *on));
      }
      issue({on, stream, items.front().header, {}, items});
    })

HCCL_API(computed, HcclBarrier, (void* comm, void* stream), {
  const auto on = communicator_of(comm);
  const auto call = header(kBarrier, 0, 0);
  issue(on, stream, call, [=] { barrier(*on, call); });
})

HCCL_API(computed, HcclGroupStart, (), { ++group_depth; })

HCCL_API(computed, HcclGroupEnd, (), {
  if (!group_depth) refuse_call(kParameter, "no HcclGroupStart came before");
  if (--group_depth) return;
  auto rest = std::move(group);
  group.clear();
  while (
      !rest.empty()) {  // one task per communicator and stream, in the order of their first calls
    std::vector<Operation> together;
    std::vector<Operation> later;
    for (auto& each : rest) {
      const bool fits = together.empty() ||
                        (each.on == together.front().on && each.stream == together.front().stream);
      (fits ? together : later).push_back(std::move(each));
    }
    submit(std::move(together));
    rest = std::move(later);
  }
})
