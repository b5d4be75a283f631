// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Memory registered with a communicator for direct access by peers. The emulator always transfers
// over connections, so registrations are only checked and stored. Signatures:
// torch_npu/csrc/distributed/HcclCompile.h and torch_npu/csrc/core/npu/interface/HcclInterface.cpp
// (Ascend/pytorch, BSD).
#include <map>

#include "core/device.h"
#include "api.h"

using namespace emu;
using namespace emu::hccl;

namespace {

struct Memory {
  uintptr_t start = 0;
  uint64_t bytes = 0;
  bool contains(uintptr_t at, uint64_t size) const {
    return at >= start && size <= bytes && at - start <= bytes - size;
  }
};

using MemoryMap = std::map<std::pair<void*, uintptr_t>, Memory>;
struct Windows {
  std::mutex mutex;
  uintptr_t next = 1;
  MemoryMap windows;  // by communicator and handle
  MemoryMap ranges;   // by communicator and start of reserved addresses
  MemoryMap active;   // by communicator and start of memory within them
};
Windows& all() { return process.part<Windows>(); }

uintptr_t start_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

void check_buffer(const void* address, uint64_t bytes, const char* name) {
  if (!address) refuse_call(kNullPointer, name, " is null");
  if (!bytes) refuse_call(kParameter, "the size is 0");
}

// Throws unless all of it is device memory that is allocated or mapped.
void check_mapped(const void* address, uint64_t bytes, const char* name) {
  if (!is_device(address)) refuse_call(kParameter, name, " is not device memory: ", address);
  try {
    locate(address, bytes);
  } catch (const Error& error) { refuse_call(kParameter, name, ": ", error.what()); }
}

void remove(MemoryMap& from, void* comm, uintptr_t key, const char* what) {
  communicator(comm);
  std::lock_guard lock(all().mutex);
  if (!from.erase({comm, key}))
    refuse_call(kNotFound, reinterpret_cast<void*>(key), " is no ", what, " of this communicator");
}

}  // namespace

void emu::hccl::forget_memory(void* comm) {
  std::lock_guard lock(all().mutex);
  for (auto* map : {&all().windows, &all().ranges, &all().active})
    std::erase_if(*map, [&](const auto& entry) { return entry.first.first == comm; });
}

HCCL_API(keeps, HcclCommRegister,
    (void* comm, void* address, uint64_t bytes, void** handle, uint32_t flag), {
      communicator(comm);
      check_buffer(address, bytes, "addr");
      if (!handle) refuse_call(kNullPointer, "handle is null");
      if (flag) refuse_call(kParameter, "flag is ", flag, "; allowed: 0");
      check_mapped(address, bytes, "addr");
      std::lock_guard lock(all().mutex);
      *handle = reinterpret_cast<void*>(all().next);
      all().windows[{comm, all().next++}] = {start_of(address), bytes};
    })
HCCL_API(keeps, HcclCommDeregister, (void* comm, void* handle),
    { remove(all().windows, comm, start_of(handle), "registered memory"); })
HCCL_API(nothing("ranks have no memory of each other to map: what they exchange is sent"),
    HcclCommExchangeMem, (void* comm, void* handle, const uint32_t* peers, uint32_t count), {
      const auto on = communicator(comm);
      if (!handle) refuse_call(kNullPointer, "handle is null");
      if (count && !peers) refuse_call(kNullPointer, "peerRanks is null");
      for (uint32_t i = 0; i < count; ++i) rank_within(text("peerRanks[", i, "]"), peers[i], *on);
      std::lock_guard lock(all().mutex);
      const auto found = all().windows.find({comm, start_of(handle)});
      if (found == all().windows.end())
        refuse_call(kNotFound, handle, " is no registered memory of this communicator");
      check_mapped(reinterpret_cast<void*>(found->second.start), found->second.bytes,
          "the registered memory");
    })

HCCL_API(keeps, HcclCommSetMemoryRange,
    (void* comm, void* base, size_t bytes, size_t alignment, uint64_t), {
      communicator(comm);
      check_buffer(base, bytes, "baseVirPtr");
      if (alignment) refuse_call(kParameter, "alignment is ", alignment, "; allowed: 0");
      std::lock_guard lock(all().mutex);
      all().ranges[{comm, start_of(base)}] = {start_of(base), bytes};
    })
HCCL_API(keeps, HcclCommUnsetMemoryRange, (void* comm, void* base), {
  communicator(comm);
  {
    std::lock_guard lock(all().mutex);
    const auto range = all().ranges.find({comm, start_of(base)});
    for (const auto& [key, memory] : all().active)
      if (key.first == comm && range != all().ranges.end() &&
          range->second.contains(memory.start, memory.bytes))
        refuse_call(kParameter, "memory at ", reinterpret_cast<void*>(memory.start),
            " in this range is active; call HcclCommDeactivateCommMemory before");
  }
  remove(all().ranges, comm, start_of(base), "memory range");
})
HCCL_API(keeps, HcclCommActivateCommMemory,
    (void* comm, void* address, size_t bytes, size_t offset, void* handle, uint64_t), {
      communicator(comm);
      check_buffer(address, bytes, "virPtr");
      if (offset) refuse_call(kParameter, "offset is ", offset, "; allowed: 0");
      if (!handle) refuse_call(kNullPointer, "handle is null");
      std::lock_guard lock(all().mutex);
      for (const auto& [key, range] : all().ranges) {
        if (key.first != comm || !range.contains(start_of(address), bytes)) continue;
        for (const auto& [other, memory] : all().active)
          if (other.first == comm && start_of(address) < memory.start + memory.bytes &&
              memory.start < start_of(address) + bytes)
            refuse_call(kParameter, "virPtr: ", bytes, " bytes at ", address,
                " overlap the active memory at ", reinterpret_cast<void*>(memory.start));
        check_mapped(address, bytes, "virPtr");
        all().active[{comm, start_of(address)}] = {start_of(address), bytes};
        return;
      }
      refuse_call(
          kNotFound, bytes, " bytes at ", address, " are in no range of HcclCommSetMemoryRange");
    })
HCCL_API(keeps, HcclCommDeactivateCommMemory, (void* comm, void* address),
    { remove(all().active, comm, start_of(address), "active memory"); })
