// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Kernels compiled for the NPU's own cores (Triton, AscendC): their machine code cannot run here. A
// binary is loaded without effect, and a kernel is refused by its name where a program looks it up,
// which is before its first launch. Declarations: torch_npu/csrc/inductor/mlir/hacl_rt.h and
// acl/acl_rt.h in the torch_npu wheel; a caller: torch_npu/_inductor/codegen (BSD).
#include <cstdio>

#include "core/entry_point.h"
#include "core/refusal.h"

using namespace emu;

namespace {
struct Binary {};

// Callers read no message of these calls, so it is printed too.
int refuse_kernel(const char* call, const char* kernel) {
  if (!kernel) return refuse(call);
  const auto message = text("the kernel '", kernel, "' (", call,
      ") is not emulated: it is compiled for the NPU's cores. An operator can be given in Python "
      "or C++ instead "
      "(ASCEND_EMULATOR_OPERATORS)");
  std::fprintf(stderr, "[ascend-emulator] %s\n", message.c_str());
  return fail(kUnsupported, message);
}
}  // namespace

ACL_API(keeps, rtDevBinaryRegister, (const void*, void** handle), { *handle = new Binary; })
ACL_API(keeps, aclrtBinaryLoadFromData, (const void*, size_t, const void*, void** binHandle),
    { *binHandle = new Binary; })
ACL_API(keeps, aclrtBinaryUnLoad, (void* binHandle), { delete static_cast<Binary*>(binHandle); })

EXPORT int rtFunctionRegister(void*, const void*, const char* name, const void*, uint32_t) {
  return refuse_kernel("rtFunctionRegister", name);
}
EXPORT int aclrtBinaryGetFunction(void*, const char* name, void**) {
  return refuse_kernel("aclrtBinaryGetFunction", name);
}
