// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common definitions of HCCL's entry points.
#pragma once
#include "core/entry_point.h"
#include "communicator.h"

namespace emu::hccl {

// The communicator of a handle; throws if there is none.
std::shared_ptr<Communicator> communicator(void* handle);

// The communicator that HcclGetCommName gives this name, on the current NPU.
std::shared_ptr<Communicator> named(const char* argument, const std::string& name);

inline void rank_within(const std::string& name, uint32_t rank, const Communicator& on) {
  if (static_cast<int64_t>(rank) >= on.ranks)
    refuse_call(kParameter, name, " is ", rank, "; the communicator has ", on.ranks, " ranks");
}

// Removes what is registered with a communicator that is destroyed: another one may get its handle.
void forget_memory(void* handle);

// HcclResult of an ACL status.
inline int result_of(int status) {
  switch (status) {
    case kOk: return kSuccess;
    case kInvalidParam:
    case kOpParam:
    case kInvalidDevice:
    case kContextNull: return kParameter;
    case kUnsupported: return kNotSupported;
    case kOutOfMemory: return kMemory;
  }
  return status < 100 ? status : kInternal;
}

}  // namespace emu::hccl

// A C entry point of HCCL: as ACL_API, but it returns an HcclResult.
#define HCCL_API(EFFECT, NAME, PARAMS, ...)                   \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)                        \
  EXPORT int NAME PARAMS {                                    \
    return emu::hccl::result_of(emu::intercepted(#NAME, [&] { \
      [&] __VA_ARGS__();                                      \
      emu::note(#NAME);                                       \
    }));                                                      \
  }
