// Device and host memory, and copies between them. A host pointer where a device pointer belongs, or the other way round,
// is refused. Signatures: see device.cpp.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "../core/device.h"
#include "../core/registry.h"
#include "../core/stream.h"

using namespace emu;

namespace {

enum CopyKind : int32_t { host_to_host = 0, host_to_device = 1, device_to_host = 2, device_to_device = 3 };

void allocate(void** address, size_t bytes) {
  check(address != nullptr, kInvalidParam, "no place for the result");
  *address = device(current_device()).allocate(bytes);
}

void copy(void* to, size_t room, const void* from, size_t bytes, int32_t kind) {
  if (bytes == 0) return;
  check(bytes <= room, kInvalidParam, "copying ", bytes, " bytes into ", room);
  check(kind >= host_to_host && kind <= device_to_device, kInvalidParam, "copy kind ", kind, " is not emulated");
  const bool onto_device = kind == host_to_device || kind == device_to_device, off_device = kind == device_to_host || kind == device_to_device;
  void* target = either(to, onto_device, "the destination", bytes);
  const void* source = either(from, off_device, "the source", bytes);
  std::memmove(target, source, bytes);
}

void fill(void* at, size_t room, int32_t value, size_t bytes) {
  check(bytes <= room, kInvalidParam, "setting ", bytes, " bytes of ", room);
  if (!bytes) return;
  std::memset(either(at, is_device(at), "the memory", bytes), value, bytes);
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

// The kinds of memory (DDR, HBM, their huge-page parts …) are one pool here.
ACL_API(bookkeeping, aclrtGetMemInfo, (int32_t, size_t* available, size_t* total), {
  auto& npu = device(current_device());
  *available = npu.available();
  *total = npu.capacity();
})

ACL_API(computed, aclrtMemcpy, (void* to, size_t room, const void* from, size_t bytes, int32_t kind), {
  stream_of(nullptr).submit([&] { copy(to, room, from, bytes, kind); });
})
ACL_API(computed, aclrtMemcpyAsync, (void* to, size_t room, const void* from, size_t bytes, int32_t kind, void* stream), {
  stream_of(stream).submit([&] { copy(to, room, from, bytes, kind); });
})
ACL_API(computed, aclrtMemset, (void* at, size_t room, int32_t value, size_t bytes), {
  stream_of(nullptr).submit([&] { fill(at, room, value, bytes); });
})
ACL_API(computed, aclrtMemsetAsync, (void* at, size_t room, int32_t value, size_t bytes, void* stream), {
  stream_of(stream).submit([&] { fill(at, room, value, bytes); });
})
