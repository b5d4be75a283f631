// Device and host memory, and copies between them. A host pointer where a device pointer belongs, or the other way round,
// is refused. Signatures: see device.cpp.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "../core/device.h"
#include "../core/observe.h"
#include "../core/registry.h"
#include "../core/stream.h"

using namespace emu;

namespace {

enum CopyKind : int32_t { host_to_host = 0, host_to_device = 1, device_to_host = 2, device_to_device = 3 };

void allocate(void** address, size_t bytes) {
  check(address != nullptr, kInvalidParam, "no place for the result");
  *address = device(current_device()).allocate(bytes);
}

// That the bytes are of one allocation.
void check_range(const void* address, size_t bytes) {
  for (int i = 0; i < device_count(); ++i) {
    if (!device(i).owns(address)) continue;
    const auto left = device(i).left(address);
    check(bytes <= left, kInvalidParam, bytes, " bytes at ", address, ", where ", left, " are allocated");
  }
}

bool onto_device(int32_t kind) { return kind == host_to_device || kind == device_to_device; }
bool off_device(int32_t kind) { return kind == device_to_host || kind == device_to_device; }

void check_copy(const void* to, size_t room, const void* from, size_t bytes, int32_t kind) {
  check(bytes <= room, kInvalidParam, "copying ", bytes, " bytes into ", room);
  check(kind >= host_to_host && kind <= device_to_device, kInvalidParam, "copy kind ", kind, " is not emulated");
  if (bytes == 0) return;
  either(to, onto_device(kind), "the destination");
  either(from, off_device(kind), "the source");
  if (onto_device(kind)) check_range(to, bytes);
  if (off_device(kind)) check_range(from, bytes);
}

void copy(void* to, size_t room, const void* from, size_t bytes, int32_t kind) {
  check_copy(to, room, from, bytes, kind);
  if (bytes) std::memmove(either(to, onto_device(kind), "the destination"), either(from, off_device(kind), "the source"), bytes);
}

void fill(void* at, size_t room, int32_t value, size_t bytes) {
  check(bytes <= room, kInvalidParam, "setting ", bytes, " bytes of ", room);
  if (!bytes) return;
  if (is_device(at)) check_range(at, bytes);
  std::memset(is_device(at) ? to_kernel(at) : at, value, bytes);
}

}  // namespace

ACL_API(computed, aclrtMalloc, (void** address, size_t bytes, int32_t), { allocate(address, bytes); })
ACL_API(computed, aclrtMallocAlign32, (void** address, size_t bytes, int32_t), { allocate(address, bytes); })
ACL_API(computed, aclrtFree, (void* address), {
  if (!address) return;
  check(is_device(address), kInvalidParam, "not device memory: ", address);
  for (int i = 0; i < device_count(); ++i) {
    auto& owner = device(i);
    if (owner.owns(address)) return owner.release(address);
  }
})
namespace {
std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;  // address -> bytes
}  // namespace
namespace emu {
bool is_pinned(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(pinned_mutex);
  auto block = pinned.upper_bound(at);
  if (block == pinned.begin()) return false;
  --block;
  return at < block->first + block->second;
}
}  // namespace emu
ACL_API(computed, aclrtMallocHost, (void** address, size_t bytes), {
  *address = std::aligned_alloc(4096, std::max<size_t>((bytes + 4095) / 4096 * 4096, 4096));
  check(*address != nullptr, kOutOfMemory, "no host memory for ", bytes, " bytes");
  std::lock_guard lock(pinned_mutex);
  pinned[reinterpret_cast<uintptr_t>(*address)] = bytes;
})
ACL_API(computed, aclrtFreeHost, (void* address), {
  if (!address) return;
  {
    std::lock_guard lock(pinned_mutex);
    check(pinned.erase(reinterpret_cast<uintptr_t>(address)), kInvalidParam, address, " is no memory of aclrtMallocHost");
  }
  std::free(address);
})

// The kinds of memory (DDR, HBM, their huge-page parts …) are one pool here.
ACL_API(bookkeeping, aclrtGetMemInfo, (int32_t, size_t* available, size_t* total), {
  auto& npu = device(current_device());
  *available = npu.available();
  *total = npu.capacity();
})

// Where the work of a copy lies: device memory is read or written once or both, and the link carries what crosses it.
namespace {
Work cost(size_t bytes, int32_t kind) {
  const bool crosses = kind == host_to_device || kind == device_to_host;
  return {kind == device_to_device ? 2.0 * bytes : crosses ? 1.0 * bytes : 0, 0, 0, crosses ? 1.0 * bytes : 0, {}};
}
}  // namespace

// The synchronous calls have no place in any stream's order.
ACL_API(computed, aclrtMemcpy, (void* to, size_t room, const void* from, size_t bytes, int32_t kind), {
  check_capture_mode("aclrtMemcpy");
  HostObservation observed("aclrtMemcpy");
  copy(to, room, from, bytes, kind);
})
ACL_API(computed, aclrtMemcpyAsync, (void* to, size_t room, const void* from, size_t bytes, int32_t kind, void* handle), {
  check_copy(to, room, from, bytes, kind);
  auto& stream = stream_of(handle);
  Task task{"aclrtMemcpyAsync", nullptr, Kind::copy};
  task.work = cost(bytes, kind);
  const bool pageable = (kind == host_to_device && !is_pinned(from)) || (kind == device_to_host && !is_pinned(to));
  if (pageable) check_capture_mode("aclrtMemcpyAsync of memory that is not pinned");
  check(!pageable || !stream.capture, kCaptureBlocks, "the host memory is not pinned, so that the copy blocks the host, and cannot be captured");
  if (kind == host_to_device && pageable) {
    // Pageable memory may change as soon as this returns: CANN takes a copy of it first.
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    task.run = [=] { std::memcpy(to_kernel(to), staged->data(), bytes); };
    stream.submit(std::move(task));
    return;
  }
  task.run = [=] { copy(to, room, from, bytes, kind); };
  const auto ticket = stream.submit(std::move(task));
  // Into pageable memory a copy is done when this returns.
  if (pageable) stream.wait(ticket);
})
ACL_API(computed, aclrtMemset, (void* at, size_t room, int32_t value, size_t bytes), {
  check_capture_mode("aclrtMemset");
  fill(at, room, value, bytes);
})
ACL_API(computed, aclrtMemsetAsync, (void* at, size_t room, int32_t value, size_t bytes, void* stream), {
  check(bytes <= room, kInvalidParam, "setting ", bytes, " bytes of ", room);
  Task task{"aclrtMemsetAsync", [=] { fill(at, room, value, bytes); }, Kind::copy};
  task.work.bytes = bytes;
  stream_of(stream).submit(std::move(task));
})
