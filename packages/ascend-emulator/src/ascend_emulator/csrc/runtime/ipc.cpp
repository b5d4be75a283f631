// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Shares aclrtMalloc's memory with other processes. The key is `ascend-emulator:<key in the
// arena>:<offset in the allocation>`. Signatures:
// torch_npu/csrc/core/npu/interface/AclInterface.cpp (Ascend/pytorch, BSD); rules: CANN's public
// API reference, "aclrtIpcMemGetExportKey".
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

#include "core/arena.h"
#include "core/entry_point.h"
#include "core/stream.h"
#include "core/virtual_memory.h"

using namespace emu;

namespace {
constexpr size_t kKeyLength = 65;

struct Key {
  uint64_t part = 0, delta = 0;
  bool own() const { return arena::owner(part) == getpid(); }
};
Key parse(const char* text) {
  Key key;
  check(
      text && std::sscanf(text, "ascend-emulator:%" SCNx64 ":%" SCNx64, &key.part, &key.delta) == 2,
      kInvalidParam, "not a key of aclrtIpcMemGetExportKey");
  return key;
}

struct Opened {
  void* address;
  arena::Import import;
  int times;
};
struct Imports {
  std::mutex mutex;
  std::map<uint64_t, Opened> opened;  // by the key in the arena
};
Imports& imports() { return process.part<Imports>(); }

void synchronize_all(int npu) {
  for (const auto& stream : streams_of(npu)) stream->synchronize();
}
}  // namespace

ACL_API(computed, aclrtIpcMemGetExportKey,
    (void* address, size_t bytes, char* key, size_t length, uint64_t flags), {
      check(length == kKeyLength, kInvalidParam, "the key's length is ", length, "; it must be ",
          kKeyLength);
      check(flags <= 1, kInvalidParam, "flags are ", flags,
          "; allowed: 0, and 1, which lets every process import it");
      const auto place = locate(address, bytes);
      check(place.npu != kNoNpu && device(place.npu).owns(address), kInvalidParam,
          "not memory of aclrtMalloc: ", address);
      synchronize_all(place.npu);  // the memory is moved to the arena
      const auto shared = device(place.npu).share(address);
      arena::offer(shared.key, flags & 1);
      std::snprintf(key, length, "ascend-emulator:%" PRIx64 ":%" PRIx64, shared.key, shared.delta);
    })
ACL_API(
    computed, aclrtIpcMemSetImportPid, (const char* key, const int32_t* processes, size_t count), {
      check(processes != nullptr, kInvalidParam, "the list of processes is null");
      arena::allow(parse(key).part, processes, count);
    })
// The flag enables peer access, which is always enabled.
ACL_API(computed, aclrtIpcMemImportByKey, (void** address, const char* text, uint64_t flags), {
  check(flags <= 1, kInvalidParam, "flags are ", flags, "; allowed: 0 or 1");
  const auto key = parse(text);
  std::lock_guard lock(imports().mutex);
  auto found = imports().opened.find(key.part);
  if (found == imports().opened.end()) {
    const int npu = current_device();
    const auto import = arena::open(key.part);
    const uint64_t bytes =
        (import.bytes + virtual_memory::kPage - 1) / virtual_memory::kPage * virtual_memory::kPage;
    void* start = virtual_memory::reserve(bytes);
    virtual_memory::map(start, {bytes, npu, import.file, import.offset});
    found = imports().opened.emplace(key.part, Opened{start, import, 0}).first;
  }
  ++found->second.times;
  *address = static_cast<char*>(found->second.address) + key.delta;
})
// In the exporting process: no further imports. In an importing process: unmaps the memory.
ACL_API(computed, aclrtIpcMemClose, (const char* text), {
  const auto key = parse(text);
  std::lock_guard lock(imports().mutex);
  const auto found = imports().opened.find(key.part);
  if (found == imports().opened.end()) {
    check(key.own(), kInvalidParam, "the key was not imported by this process");
    return arena::withdraw(key.part);
  }
  if (--found->second.times > 0) return;
  virtual_memory::unmap(found->second.address);
  virtual_memory::release(found->second.address);
  arena::close_import(found->second.import);
  imports().opened.erase(found);
})
