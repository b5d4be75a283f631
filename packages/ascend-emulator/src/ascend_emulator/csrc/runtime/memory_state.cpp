// How much memory is used, and which of it is faulty. Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp
// (Ascend/pytorch, BSD); structures: memory_types.h.
#include "core/device.h"
#include "core/registry.h"
#include "memory_types.h"

using namespace emu;

// The kinds of memory (DDR, HBM, their huge-page parts …) are one pool here.
ACL_API(answers, aclrtGetMemInfo, (int32_t, size_t* available, size_t* total), {
  auto& npu = device(current_device());
  *available = npu.available();
  *total = npu.capacity();
})
// By component; all is the program's here.
ACL_API(answers, aclrtGetMemUsageInfo, (uint32_t id, Usage* components, size_t room, size_t* count), {
  const auto [now, most] = device(static_cast<int>(id)).usage();
  *count = 1;
  if (room) components[0] = {"program", now, most, {}};
})

// Memory with an uncorrectable error, after one was injected (fault.h): a cache line.
ACL_API(answers, aclrtGetMemUceInfo, (int32_t id, FaultyRange* ranges, size_t room, size_t* count), {
  void* const faulty = device(id).spoiled();
  *count = faulty && room ? 1 : 0;
  if (*count) ranges[0] = {faulty, 64, {}};
})
ACL_API(keeps, aclrtMemUceRepair, (int32_t id, const FaultyRange*, size_t), { device(id).repair(); })
