// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Memory usage and memory errors. Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp
// (Ascend/pytorch, BSD); structures: memory_types.h.
#include "core/device.h"
#include "core/entry_point.h"
#include "memory_types.h"

using namespace emu;

// The memory types (DDR, HBM, their huge-page parts …) share one pool.
ACL_API(answers, aclrtGetMemInfo, (int32_t, size_t* available, size_t* total), {
  auto& npu = device(current_device());
  *available = npu.available();
  *total = npu.capacity();
})
// Usage by component; everything is the program's.
ACL_API(answers, aclrtGetMemUsageInfo,
    (uint32_t id, Nullable<Usage> components, size_t room, size_t* count), {
      const auto [now, most] = device(static_cast<int>(id)).usage();
      *count = 1;
      if (room && components) *components = {"program", now, most, {}};
    })

// Address of an injected uncorrectable error (core/fault.h): one cache line.
ACL_API(answers, aclrtGetMemUceInfo,
    (int32_t id, Nullable<FaultyRange> ranges, size_t room, size_t* count), {
      void* const faulty = device(id).memory_error_address();
      *count = faulty && room && ranges ? 1 : 0;
      if (*count) *ranges = {faulty, 64, {}};
    })
ACL_API(keeps, aclrtMemUceRepair, (int32_t id, const FaultyRange*, size_t),
    { device(id).clear_memory_error(); })

// What happened to the device, after a failure. An operator's refusal is none of it: errorType 0
// (ACL_RT_NO_ERROR). torch_npu asks after each error on Ascend950 and later (NPUException.cpp).
// Structure: CANN's public API reference, "aclrtGetErrorVerbose".
namespace {
struct ErrorInfo {
  uint8_t repairable, detailed, reserved[2];
  int32_t type;  // aclrtErrorType
  struct {
    size_t count;
    FaultyRange ranges[20];
  } memory;
};
constexpr int32_t kNoError = 0, kMemory = 1;
}  // namespace
ACL_API(answers, aclrtGetErrorVerbose, (int32_t id, ErrorInfo* info), {
  void* const faulty = device(id).memory_error_address();
  *info = {};
  info->type = faulty ? kMemory : kNoError;
  if (!faulty) return;
  info->repairable = info->detailed = 1;
  info->memory.count = 1;
  info->memory.ranges[0] = {faulty, 64, {}};
})
ACL_API(keeps, aclrtRepairError, (int32_t id, const ErrorInfo* info), {
  check(info != nullptr, kInvalidParam, "errorInfo is null");
  check(info->type == kMemory, kUnsupported, "errorType is ", info->type,
      "; repaired are memory errors, 1");
  device(id).clear_memory_error();
})
