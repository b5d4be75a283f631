// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Limits of the cores that operators use: of a process's NPU, and of a stream, which a thread uses
// from aclrtUseStreamResInCurrentThread on. They are kept and told; results do not depend on them.
// Signatures and the order stream, process, hardware: CANN's public API reference,
// "aclrtSetDeviceResLimit" and "aclrtGetResInCurrentThread".
#include <array>
#include <map>
#include <mutex>

#include "core/entry_point.h"
#include "core/stream.h"

using namespace emu;

namespace {

constexpr int kTypes = 2;                     // aclrtDevResLimitType: cube cores, vector cores
using Limits = std::array<uint32_t, kTypes>;  // 0: none

struct CoreLimits {
  std::mutex mutex;
  std::map<int, Limits> of_npu;
  std::map<std::weak_ptr<Stream>, Limits, std::owner_less<>> of_stream;
};
CoreLimits& core_limits() { return process.part<CoreLimits>(); }
thread_local std::weak_ptr<Stream> in_use;

uint32_t cores(int type) {
  check(type >= 0 && type < kTypes, kInvalidParam, "type is ", type,
      "; allowed: 0 (cube cores) and 1 (vector cores)");
  return static_cast<uint32_t>(type ? chip().vector_cores : chip().cube_cores);
}

uint32_t checked(int type, uint32_t value) {
  check(value > 0 && value <= cores(type), kInvalidParam, "value is ", value, "; ", chip().name,
      " has ", cores(type), type ? " vector cores" : " cube cores");
  return value;
}

uint32_t limit(int npu, const std::weak_ptr<Stream>& stream, int type) {
  const auto hardware = cores(type);
  std::lock_guard lock(core_limits().mutex);
  if (const auto own = core_limits().of_stream.find(stream);
      own != core_limits().of_stream.end() && !stream.expired() && own->second[type])
    return own->second[type];
  const auto own = core_limits().of_npu.find(npu);
  return own != core_limits().of_npu.end() && own->second[type] ? own->second[type] : hardware;
}

}  // namespace

ACL_API(keeps, aclrtSetDeviceResLimit, (int32_t npu, int32_t type, uint32_t value), {
  device(npu);
  const auto allowed = checked(type, value);
  std::lock_guard lock(core_limits().mutex);
  core_limits().of_npu[npu][type] = allowed;
})
ACL_API(keeps, aclrtResetDeviceResLimit, (int32_t npu), {
  device(npu);
  std::lock_guard lock(core_limits().mutex);
  core_limits().of_npu.erase(npu);
})
ACL_API(answers, aclrtGetDeviceResLimit, (int32_t npu, int32_t type, uint32_t* value), {
  device(npu);
  *value = limit(npu, {}, type);
})

ACL_API(keeps, aclrtSetStreamResLimit, (void* handle, int32_t type, uint32_t value), {
  const auto stream = stream_at(handle);
  const auto allowed = checked(type, value);
  std::lock_guard lock(core_limits().mutex);
  core_limits().of_stream[stream][type] = allowed;
})
ACL_API(keeps, aclrtResetStreamResLimit, (void* handle), {
  const auto stream = stream_at(handle);
  std::lock_guard lock(core_limits().mutex);
  core_limits().of_stream.erase(stream);
})
ACL_API(answers, aclrtGetStreamResLimit, (void* handle, int32_t type, uint32_t* value), {
  const auto stream = stream_at(handle);
  *value = limit(stream->device, stream, type);
})

ACL_API(keeps, aclrtUseStreamResInCurrentThread, (void* handle), { in_use = stream_at(handle); })
ACL_API(keeps, aclrtUnuseStreamResInCurrentThread, (void* handle), {
  stream_at(handle);
  in_use.reset();
})
ACL_API(answers, aclrtGetResInCurrentThread, (int32_t type, uint32_t* value),
    { *value = limit(current_device(), in_use, type); })
