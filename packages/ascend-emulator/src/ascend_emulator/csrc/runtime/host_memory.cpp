// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Page-locked and registered host memory, and pointer attributes. Signatures:
// torch_npu/csrc/core/npu/interface/AclInterface.cpp (Ascend/pytorch, BSD); structures and values:
// CANN's public API reference, pages of the same names.
#include "core/host_memory.h"

#include "core/device.h"
#include "core/entry_point.h"
#include "memory_types.h"

using namespace emu;

namespace {
// aclrtMallocConfig. The only attribute documented for host memory requests device access by the
// host's address, which always works here.
struct Attribute {
  int32_t attribute;
  uint64_t value;
};
struct Configuration {
  const Attribute* attributes;
  size_t count;
};
constexpr uint32_t kMapped = 0x2, kPinned = 0x10000000;
}  // namespace

ACL_API(computed, aclrtMallocHost, (void** address, size_t bytes),
    { *address = host_memory::allocate(bytes); })
ACL_API(computed, aclrtMallocHostWithCfg, (void** address, uint64_t bytes, const Configuration*),
    { *address = host_memory::allocate(bytes); })
ACL_API(computed, aclrtFreeHost, (void* address), {
  if (address) host_memory::release(address);
})
// aclrtHostRegisterType 0: mapped for devices, at the same address.
ACL_API(computed, aclrtHostRegister,
    (void* address, uint64_t bytes, int32_t type, void** device_address), {
      check_emulated(
          type == 0, kInvalidParam, "registration type ", type, " is not emulated; 0, mapped, is");
      host_memory::register_range(address, bytes, true);
      *device_address = address;
    })
ACL_API(computed, aclrtHostRegisterV2, (void* address, uint64_t bytes, uint32_t flags), {
  check(flags != 0 && (flags & ~(kMapped | kPinned)) == 0, kInvalidParam, "registration flags are ",
      flags, "; allowed: ", kMapped, " (mapped), ", kPinned, " (pinned)");
  host_memory::register_range(address, bytes, flags & kMapped);
})
ACL_API(computed, aclrtHostUnregister, (void* address), { host_memory::unregister(address); })

ACL_API(computed, aclrtPointerGetAttributes, (const void* address, PointerAttributes* attributes), {
  *attributes = {};
  attributes->page_bytes = 4096;
  auto& [id, type] = attributes->location;
  if (is_pinned(address)) {
    type = kHost;
  } else if (is_device(address)) {
    const auto place = locate(address, 1);
    type = place.npu == kNoNpu ? kHost : kDevice;
    id = place.npu == kNoNpu ? 0 : place.npu;
  } else {
    type = kUnregistered;
  }
})
