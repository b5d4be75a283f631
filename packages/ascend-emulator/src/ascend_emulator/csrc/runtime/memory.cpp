// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Device and host memory, and copies between them. Host pointers instead of device pointers, and
// vice versa, are refused. Signatures: see device.cpp.
#include <cstring>
#include <utility>

#include "core/graph.h"
#include "core/host_memory.h"
#include "core/recheck.h"
#include "core/entry_point.h"
#include "core/rules.h"
#include "core/stream.h"
#include "core/trace.h"
#include "memory_types.h"

using namespace emu;

namespace {

// aclrtMemcpyKind (CANN's API reference). within_npu and between_npus specify device_to_device.
enum CopyKind : int32_t {
  host_to_host,
  host_to_device,
  device_to_host,
  device_to_device,
  by_addresses,
  host_by_buffer,
  within_npu,
  between_npus
};

void allocate(void** address, size_t bytes) { *address = device(current_device()).allocate(bytes); }

struct Copy {
  void* to;
  size_t room;
  const void* from;
  size_t bytes;
  int32_t kind;
  bool onto_device = false, off_device = false, pinned = false;
  Recheck memory;

  Copy(void* to, size_t room, const void* from, size_t bytes, int32_t kind)
      : to(to), room(room), from(from), bytes(bytes), kind(kind) {
    check(bytes <= room, kInvalidParam, "copying ", bytes, " bytes into ", room);
    check(kind >= host_to_host && kind <= between_npus, kInvalidParam, "copy kind is ", kind,
        "; allowed: ", host_to_host, " to ", between_npus);
    const bool between_devices = kind == device_to_device || kind >= within_npu;
    onto_device = kind == by_addresses
                      ? is_device(to)
                      : between_devices || kind == host_to_device || kind == host_by_buffer;
    off_device = kind == by_addresses ? is_device(from) : between_devices || kind == device_to_host;
    pinned = bytes && onto_device != off_device && is_pinned(onto_device ? from : to);
    views();
    if (onto_device && off_device && bytes) {
      const int target = locate(to, 1).npu, source = locate(from, 1).npu;
      check(target == kNoNpu || source == kNoNpu || peer_access(target, source), kInvalidParam,
          "copying from NPU ", source, " to NPU ", target,
          ", between which it is not enabled; call aclrtDeviceEnablePeerAccess");
    }
  }
  std::pair<void*, const void*> views() const {
    if (bytes == 0) return {to, from};
    return {resolve(to, onto_device, "the destination", bytes),
        resolve(from, off_device, "the source", bytes)};
  }
  void run() const {
    recheck();
    const auto [target, source] = views();
    if (bytes) std::memmove(target, source, bytes);
  }
  void recheck() const {
    memory.verify([&] {
      if (bytes && onto_device) memory.check("the destination", to, bytes);
      if (bytes && off_device) memory.check("the source", from, bytes);
      check(!pinned || is_pinned(onto_device ? from : to), kInvalidParam,
          onto_device ? "the source" : "the destination",
          " is host memory that was freed after the call: ", onto_device ? from : to);
    });
  }
  // The host's side, of aclrtMallocHost: nothing else protects pages of its own.
  std::vector<host_access::Range> host_range() const {
    const void *host = onto_device ? from : to, *npu = onto_device ? to : from;
    if (!host_memory::allocated(host)) return {};
    return {{reinterpret_cast<uintptr_t>(host), bytes, !onto_device, locate(npu, 1).npu}};
  }
  // Bytes of device memory read and written, and bytes over the host link.
  Work cost() const {
    const double size = bytes;
    Work work;
    work.bytes = size * (onto_device + off_device);
    work.link = onto_device != off_device ? size : 0;
    return work;
  }
};

void submit(const char* name, const Copy& copy, void* handle) {
  auto& stream = stream_of(handle);
  Task task{name, [copy] { copy.run(); }, Kind::copy};
  task.work = copy.cost();
  const bool upload = copy.onto_device && !copy.off_device;
  const bool pageable = copy.bytes && copy.onto_device != copy.off_device && !copy.pinned;
  if (pageable) check_capture_mode("a copy of memory that is not pinned");
  rule("memory.pinned-in-capture", [&] {
    check(!pageable || !stream.capture, kCaptureBlocks,
        "the host memory is not pinned, so that the copy blocks the host, and cannot be captured");
  });
  if (upload && copy.bytes && (pageable || copy.kind == host_by_buffer)) {
    // Pageable memory may change when the call returns: CANN copies it first.
    Copy device_side = copy;
    device_side.pinned = false;
    auto staged = std::make_shared<std::vector<char>>(
        static_cast<const char*>(copy.from), static_cast<const char*>(copy.from) + copy.bytes);
    task.run = [copy = std::move(device_side), staged] {
      copy.recheck();
      std::memcpy(copy.views().first, staged->data(), copy.bytes);
    };
    stream.submit(std::move(task));
    return;
  }
  if (copy.pinned && host_access::races()) task.pinned = copy.host_range();
  const auto ticket = stream.submit(std::move(task));
  // Copies to pageable memory are synchronous.
  if (!pageable) return;
  stream.wait(ticket);
  host_reaches(stream.modelled);
}

// Copies of a batch, with directions from the attributes; reports the index of an invalid one.
std::vector<Copy> batch(void** to, const size_t* room, void** from, const size_t* bytes,
    size_t count, const BatchAttributes* attributes, const size_t* starts, size_t kinds,
    size_t* failed) {
  *failed = SIZE_MAX;
  check(count > 0 && kinds > 0 && kinds <= count && starts[0] == 0, kInvalidParam, count,
      " copies with ", kinds, " attributes, the first of copy ", kinds ? starts[0] : 0,
      "; allowed: as many attributes as copies or fewer, from copy 0");
  std::vector<Copy> copies;
  for (size_t kind = 0, i = 0; i < count; ++i) {
    if (kind + 1 < kinds && starts[kind + 1] == i) ++kind;
    *failed = i;
    const int32_t source = attributes[kind].from.type, target = attributes[kind].to.type;
    check(source <= kDevice && target <= kDevice && source != target, kInvalidParam, "copy ", i,
        " is from location type ", source, " to ", target,
        "; allowed: 0 (host) to 1 (device), and 1 to 0");
    copies.emplace_back(
        to[i], room[i], from[i], bytes[i], target == kDevice ? host_to_device : device_to_host);
  }
  *failed = SIZE_MAX;
  return copies;
}

// Rows of a matrix, as copies of their own. Between host and device only, height at most 5 * 1024 *
// 1024 (CANN's documentation of aclrtMemcpy2d and of its sanitizer).
std::vector<Copy> rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
    size_t height, int32_t kind) {
  check(kind == host_to_device || kind == device_to_host, kInvalidParam, "copy kind is ", kind,
      "; allowed: 1 and 2");
  check(width <= to_pitch && width <= from_pitch && height <= 5u << 20, kInvalidParam, height,
      " rows of ", width, " bytes, at distances of ", to_pitch, " and ", from_pitch,
      "; allowed: distances of at least a row, at most ", 5u << 20, " rows");
  std::vector<Copy> copies;
  for (size_t row = 0; row < height; ++row)
    copies.emplace_back(static_cast<char*>(to) + row * to_pitch, width,
        static_cast<const char*>(from) + row * from_pitch, width, kind);
  return copies;
}

void fill(void* at, size_t room, int32_t value, size_t bytes) {
  check(bytes <= room, kInvalidParam, "setting ", bytes, " bytes of ", room);
  if (bytes) std::memset(resolve(at, is_device(at), "the memory", bytes), value, bytes);
}

}  // namespace

ACL_API(
    computed, aclrtMalloc, (void** address, size_t bytes, int32_t), { allocate(address, bytes); })
ACL_API(computed, aclrtMallocAlign32, (void** address, size_t bytes, int32_t),
    { allocate(address, bytes); })
ACL_API(computed, aclrtFree, (void* address), {
  if (!address) return;
  check(is_device(address), kInvalidParam, "not device memory: ", address);
  for (int i = 0; i < device_count(); ++i) {
    auto& owner = device(i);
    if (owner.owns(address)) return owner.release(address);
  }
  raise(kInvalidParam, {"not an allocation of aclrtMalloc: ", address});
})

// Synchronous calls are not ordered with streams.
ACL_API(
    computed, aclrtMemcpy, (void* to, size_t room, const void* from, size_t bytes, int32_t kind), {
      check_capture_mode("aclrtMemcpy");
      HostTrace observed("aclrtMemcpy", static_cast<double>(bytes));
      Copy(to, room, from, bytes, kind).run();
    })
ACL_API(computed, aclrtMemcpyAsync,
    (void* to, size_t room, const void* from, size_t bytes, int32_t kind, void* stream),
    { submit("aclrtMemcpyAsync", {to, room, from, bytes, kind}, stream); })
// The condition concerns page-locked host memory, which aclrtMemcpyAsync checks as well.
ACL_API(computed, aclrtMemcpyAsyncWithCondition,
    (void* to, size_t room, const void* from, size_t bytes, int32_t kind, void* stream),
    { submit("aclrtMemcpyAsyncWithCondition", {to, room, from, bytes, kind}, stream); })
ACL_API(computed, aclrtMemcpyBatch,
    (void** to, size_t* room, void** from, size_t* bytes, size_t count, BatchAttributes* attributes,
        size_t* starts, size_t kinds, size_t* failed),
    {
      check_capture_mode("aclrtMemcpyBatch");
      HostTrace observed("aclrtMemcpyBatch");
      for (const auto& copy :
          batch(to, room, from, bytes, count, attributes, starts, kinds, failed))
        copy.run();
    })
ACL_API(computed, aclrtMemcpyBatchAsync,
    (void** to, size_t* room, void** from, size_t* bytes, size_t count, BatchAttributes* attributes,
        size_t* starts, size_t kinds, size_t* failed, void* stream),
    {
      for (const auto& copy :
          batch(to, room, from, bytes, count, attributes, starts, kinds, failed))
        submit("aclrtMemcpyBatchAsync", copy, stream);
    })
ACL_API(computed, aclrtMemcpy2d,
    (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
        int32_t kind),
    {
      check_capture_mode("aclrtMemcpy2d");
      HostTrace observed("aclrtMemcpy2d", static_cast<double>(width * height));
      for (const auto& copy : rows(to, to_pitch, from, from_pitch, width, height, kind)) copy.run();
    })
ACL_API(computed, aclrtMemcpy2dAsync,
    (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
        int32_t kind, void* stream),
    {
      for (const auto& copy : rows(to, to_pitch, from, from_pitch, width, height, kind))
        submit("aclrtMemcpy2dAsync", copy, stream);
    })
ACL_API(computed, aclrtMemset, (void* at, size_t room, int32_t value, size_t bytes), {
  check_capture_mode("aclrtMemset");
  fill(at, room, value, bytes);
})
ACL_API(computed, aclrtMemsetAsync,
    (void* at, size_t room, int32_t value, size_t bytes, void* stream), {
      check(bytes <= room, kInvalidParam, "setting ", bytes, " bytes of ", room);
      const Recheck memory;
      Task task{"aclrtMemsetAsync",
          [=] {
            if (bytes && is_device(at))
              memory.verify([&] { memory.check("the memory", at, bytes); });
            fill(at, room, value, bytes);
          },
          Kind::copy};
      task.work.bytes = bytes;
      stream_of(stream).submit(std::move(task));
    })

// "aclrtCmoAsync" of CANN's API reference: only prefetching (0), on Atlas A2, A3 and Ascend950, of
// this NPU's memory.
ACL_API(nothing("a prefetch changes no values"), aclrtCmoAsync,
    (void* at, size_t bytes, int32_t type, void* stream), {
      check(type == 0, kUnsupported, "cmoType is ", type, "; allowed: 0, a prefetch");
      check(is_chip("Ascend910B") || is_chip("Ascend910_93") || is_chip("Ascend950"), kUnsupported,
          chip().name, " has no prefetch");
      check(bytes > 0, kInvalidParam, "size is 0");
      auto& on = stream_of(stream);
      const auto npu = locate(at, bytes).npu;
      check(npu == on.device, kInvalidParam, "the memory is of NPU ", npu,
          " and the stream of NPU ", on.device);
      const Recheck memory;
      on.submit({"aclrtCmoAsync",
          [=] { memory.verify([&] { memory.check("the memory", at, bytes); }); }, Kind::copy});
    })
