// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Address ranges, physical memory and mappings, within and between processes. Signatures:
// torch_npu/csrc/core/npu/interface/AclInterface.cpp (Ascend/pytorch, BSD); rules: CANN's public
// API reference, pages of the same names.
#include "core/virtual_memory.h"

#include <memory>

#include "core/arena.h"
#include "core/entry_point.h"
#include "memory_types.h"

using namespace emu;

namespace {

struct Physical {
  uint64_t bytes, offset;
  int npu;                              // kNoNpu: host memory
  std::optional<uint64_t> shared;       // its key in the arena
  std::optional<arena::Import> import;  // of another process
  int mapped = 0;
};
struct PhysicalMemory {
  std::mutex mutex;
  std::map<void*, std::unique_ptr<Physical>> all;
  std::map<void*, Physical*> mapped;  // by the address
};
PhysicalMemory& physical_memory() { return process.part<PhysicalMemory>(); }

Physical& find(void* handle) {
  const auto found = physical_memory().all.find(handle);
  check(found != physical_memory().all.end(), kInvalidParam, handle, " is no physical memory");
  return *found->second;
}

void* keep(Physical made) {
  auto owned = std::make_unique<Physical>(std::move(made));
  void* handle = owned.get();
  physical_memory().all[handle] = std::move(owned);
  return handle;
}

void no_flags(uint64_t flags) {
  check(flags == 0, kInvalidParam, "flags are ", flags, "; allowed: 0");
}

// The only supported values by the documentation: aclrtMemHandleType none, aclrtMemAllocationType
// pinned.
uint64_t allocate_physical(uint64_t bytes, const PhysicalProperties& properties) {
  check(properties.handle_type == 0 && properties.allocation_type == 0, kInvalidParam,
      "handle type ", properties.handle_type, ", allocation type ", properties.allocation_type,
      "; allowed: 0, 0");
  check(properties.location.type == kHost || properties.location.type == kDevice, kInvalidParam,
      "location type ", properties.location.type, "; allowed: 0 (host), 1 (device)");
  check(bytes > 0 && bytes % virtual_memory::kPage == 0, kInvalidParam, "the size is ", bytes,
      "; it must be a multiple of ", virtual_memory::kPage);
  if (properties.location.type == kDevice)
    device(static_cast<int>(properties.location.id)).reserve_physical(bytes);
  try {
    const uint64_t offset = arena::allocate(bytes);
    if (poisoned()) {
      const std::vector<uint16_t> pattern(virtual_memory::kPage / 2, 0xffff);
      for (uint64_t done = 0; done < bytes; done += virtual_memory::kPage)
        arena::write(offset + done, pattern.data(), virtual_memory::kPage);
    }
    return offset;
  } catch (...) {
    if (properties.location.type == kDevice)
      device(static_cast<int>(properties.location.id)).release_physical(bytes);
    throw;
  }
}

void release(const Physical& memory) {
  if (memory.import) return arena::close_import(*memory.import);
  if (memory.shared) arena::abandon(*memory.shared);
  else arena::release(memory.offset, memory.bytes);
  if (memory.npu != kNoNpu) device(memory.npu).release_physical(memory.bytes);
}

}  // namespace

void emu::free_physical_of(int npu) {
  std::lock_guard lock(physical_memory().mutex);
  std::erase_if(physical_memory().mapped, [&](const auto& each) {
    if (each.second->npu == npu) virtual_memory::unmap(each.first);
    return each.second->npu == npu;
  });
  std::erase_if(physical_memory().all, [&](const auto& each) {
    if (each.second->npu == npu) release(*each.second);
    return each.second->npu == npu;
  });
}

// The flags choose the page size; there is only one.
ACL_API(computed, aclrtReserveMemAddress,
    (void** address, size_t bytes, size_t alignment, void* expected, uint64_t flags), {
      check(bytes > 0, kInvalidParam, bytes, " bytes of address space");
      check(alignment == 0 && expected == nullptr && flags <= 1, kInvalidParam, "alignment ",
          alignment, ", expected address ", expected, ", flags ", flags,
          "; allowed: 0, null, 0 or 1");
      chip();  // The first use maps the NPUs' memory, and with it the address space.
      *address = virtual_memory::reserve(bytes);
    })
ACL_API(computed, aclrtReleaseMemAddress, (void* address), { virtual_memory::release(address); })

// "Only 2 MB is supported" (CANN's documentation), for both options, the minimum and the
// recommended granularity.
ACL_API(answers, aclrtMemGetAllocationGranularity,
    (const PhysicalProperties* properties, int32_t option, size_t* granularity), {
      check(properties != nullptr, kInvalidParam, "properties is null");
      check(option == 0 || option == 1, kInvalidParam, "option is ", option,
          "; allowed: 0 (minimum), 1 (recommended)");
      *granularity = virtual_memory::kPage;
    })
ACL_API(computed, aclrtMallocPhysical,
    (void** handle, size_t bytes, const PhysicalProperties* properties, uint64_t flags), {
      check(properties != nullptr, kInvalidParam, "properties is null");
      no_flags(flags);
      const bool on_npu = properties->location.type == kDevice;
      const uint64_t offset = allocate_physical(bytes, *properties);
      std::lock_guard lock(physical_memory().mutex);
      *handle = keep(
          {bytes, offset, on_npu ? static_cast<int>(properties->location.id) : kNoNpu, {}, {}});
    })
ACL_API(computed, aclrtFreePhysical, (void* handle), {
  std::lock_guard lock(physical_memory().mutex);
  auto& memory = find(handle);
  check(memory.mapped == 0, kInvalidParam, "the physical memory is still mapped at ", memory.mapped,
      " addresses");
  release(memory);
  physical_memory().all.erase(handle);
})

ACL_API(computed, aclrtMapMem,
    (void* address, size_t bytes, size_t offset, void* handle, uint64_t flags), {
      no_flags(flags);
      std::lock_guard lock(physical_memory().mutex);
      auto& memory = find(handle);
      check(offset == 0 && bytes == memory.bytes, kInvalidParam, bytes, " bytes from offset ",
          offset, "; physical memory is mapped as a whole, which is ", memory.bytes, " bytes");
      virtual_memory::map(address,
          {memory.bytes, memory.npu, memory.import ? memory.import->file : -1, memory.offset});
      physical_memory().mapped[address] = &memory;
      ++memory.mapped;
    })
ACL_API(computed, aclrtUnmapMem, (void* address), {
  std::lock_guard lock(physical_memory().mutex);
  const auto mapping = physical_memory().mapped.find(address);
  check(mapping != physical_memory().mapped.end(), kInvalidParam, "no memory is mapped at ",
      address, " by aclrtMapMem");
  virtual_memory::unmap(address);
  --mapping->second->mapped;
  physical_memory().mapped.erase(mapping);
})

// Flag 1: every process may import it; otherwise those of aclrtMemSetPidToShareableHandle.
ACL_API(computed, aclrtMemExportToShareableHandle,
    (void* handle, int32_t type, uint64_t flags, uint64_t* shareable), {
      check(type == 0 && flags <= 1, kInvalidParam, "handle type ", type, ", flags ", flags,
          "; allowed: 0, and 0 or 1");
      std::lock_guard lock(physical_memory().mutex);
      auto& memory = find(handle);
      check(!memory.import && memory.npu != kNoNpu, kInvalidParam,
          "only an NPU's memory that this process allocated can be exported");
      if (!memory.shared) memory.shared = arena::publish(memory.offset, memory.bytes);
      arena::offer(*memory.shared, flags & 1);
      *shareable = *memory.shared;
    })
ACL_API(computed, aclrtMemSetPidToShareableHandle,
    (uint64_t shareable, const int32_t* processes, size_t count), {
      check(processes != nullptr, kInvalidParam, "the list of processes is null");
      arena::allow(shareable, processes, count);
    })
ACL_API(
    computed, aclrtMemImportFromShareableHandle, (uint64_t shareable, int32_t id, void** handle), {
      device(id);
      const auto import = arena::open(shareable);
      std::lock_guard lock(physical_memory().mutex);
      *handle = keep({import.bytes, import.offset, id, {}, import});
    })
