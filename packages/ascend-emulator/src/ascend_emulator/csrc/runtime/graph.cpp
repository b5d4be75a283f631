// Graph capture is not emulated yet: nothing is ever being captured, which torch_npu asks before much that it does. Beginning a
// capture refuses by name (generated). Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp (Ascend/pytorch, BSD).
#include "../core/registry.h"

ACL_API(bookkeeping, aclmdlRICaptureGetInfo, (void*, int32_t* status, void** graph), {
  *status = 0;  // none
  if (graph) *graph = nullptr;
})
ACL_API(bookkeeping, aclmdlRICaptureThreadExchangeMode, (int32_t*), {})
