// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// aclInit and the device, context and version calls. Signatures:
// torch_npu/csrc/core/npu/interface/AclInterface.cpp and NPUFunctions.cpp (Ascend/pytorch, BSD),
// CANN's public API reference "AscendCL".
#include "core/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "core/stream.h"
#include "core/entry_point.h"
#include "memory_types.h"

using namespace emu;

// Of the configuration file only {"defaultDevice": {"default_device": "0"}} is used: threads
// without a device then use it implicitly (CANN's documentation, "Initialization"). The other
// settings concern dumps and profiling.
namespace {
struct Runtime {
  std::mutex mutex;
  enum { kBefore, kInitialized, kFinalized } lifetime = kBefore;
  // NPU -> calls of aclrtSetDevice that aclrtResetDevice has not undone
  std::map<int, int> references;
  std::map<void*, int> contexts;  // of aclrtCreateContext -> NPU
  std::mutex parameters_mutex;
  std::map<int32_t, int64_t> parameters;
};
Runtime& runtime() { return process.part<Runtime>(); }

void reset(int id, bool force) {
  device(id);
  {
    auto& references = runtime().references;
    std::lock_guard lock(runtime().mutex);
    check(references.count(id), kContextNull, "NPU ", id,
        " was not set (aclrtSetDevice), or was reset");
    if (--references[id] > 0 && !force) return;
    references.erase(id);
  }
  process.reset(id);
}
}  // namespace
ACL_API(keeps, aclInit, (const char* path), {
  {
    std::lock_guard lock(runtime().mutex);
    check(runtime().lifetime != Runtime::kInitialized, kRepeatInit, "aclInit was called before");
    runtime().lifetime = Runtime::kInitialized;
  }
  if (!path) return;
  std::ifstream file(path);
  const std::string config{std::istreambuf_iterator<char>(file), {}};
  const char* const key = "\"default_device\"";
  int number = 0;
  const auto place = config.find(key);
  if (place != std::string::npos &&
      std::sscanf(config.c_str() + place + std::strlen(key), " : \"%d\"", &number) == 1)
    set_default_device(number);
})
// Memory and streams that are left end with the process; torch_npu frees some of them after this
// call.
ACL_API(keeps, aclFinalize, (), {
  std::lock_guard lock(runtime().mutex);
  check(runtime().lifetime != Runtime::kBefore, kUninitialized, "aclInit was not called");
  check(
      runtime().lifetime != Runtime::kFinalized, kRepeatFinalize, "aclFinalize was called before");
  runtime().lifetime = Runtime::kFinalized;
})
ACL_API(answers, aclrtGetDeviceCount, (uint32_t* count), { *count = device_count(); })
ACL_API(keeps, aclrtSetDevice, (int32_t id), {
  std::lock_guard lock(runtime().mutex);
  set_current_device(id);
  ++runtime().references[id];
})
// The last of as many calls as aclrtSetDevice had releases the device's streams and memory, once
// its tasks are done (CANN's documentation of the call); aclrtResetDeviceForce does at once.
ACL_API(keeps, aclrtResetDevice, (int32_t id), { reset(id, false); })
ACL_API(keeps, aclrtResetDeviceForce, (int32_t id), { reset(id, true); })
ACL_API(answers, aclrtGetDevice, (int32_t* id), {
  check(has_current_device(), kContextNull, "no device was set in this thread");
  *id = current_device();
})
ACL_API(
    answers, aclrtGetLogicDevIdByUserDevId, (int32_t user, int32_t* logical), { *logical = user; })
// One primary context per device, whose handle is the device, and those of aclrtCreateContext,
// which share the device's streams.
ACL_API(
    answers, aclrtGetCurrentContext, (void** context), { *context = &device(current_device()); })
ACL_API(keeps, aclrtSetCurrentContext, (void* context), {
  check(context != nullptr, kInvalidParam, "the context is null");
  std::lock_guard lock(runtime().mutex);
  for (int id = 0; id < device_count(); ++id)
    if (context == &device(id)) return set_current_device(id);
  const auto created = runtime().contexts.find(context);
  check(created != runtime().contexts.end(), kInvalidParam, context,
      " is no context, or it was destroyed");
  set_current_device(created->second);
})
ACL_API(keeps, aclrtCreateContext, (void** context, int32_t id), {
  std::lock_guard lock(runtime().mutex);
  set_current_device(id);  // the new context becomes the thread's
  runtime().contexts[*context = new int] = id;
})
ACL_API(keeps, aclrtDestroyContext, (void* context), {
  std::lock_guard lock(runtime().mutex);
  check(runtime().contexts.erase(context), kInvalidParam, context,
      " is not a context of aclrtCreateContext");
  delete static_cast<int*>(context);
})
// aclrtRunMode: 0 on the device, 1 on the host.
ACL_API(answers, aclrtGetRunMode, (int32_t* mode), { *mode = 1; })
ACL_API(answers, aclrtGetPrimaryCtxState, (int32_t id, Nullable<uint32_t> flags, int32_t* active), {
  if (flags) *flags = 0;
  *active = device(id).active;
})
// The two "must be different", each in the range of devices (CANN's documentation).
ACL_API(answers, aclrtDeviceCanAccessPeer, (int32_t* can, int32_t id, int32_t peer), {
  check(device(id).id != device(peer).id, kInvalidParam, "both are NPU ", id,
      "; the peer must be another");
  *can = 1;
})
// "The peer must be another device; the flags must be 0" (CANN's documentation).
namespace {
void enable_peer(int32_t peer, bool enabled) {
  const int npu = current_device();
  check(device(peer).id != npu, kInvalidParam, "the peer is NPU ", peer,
      ", the current one; it must be another");
  enable_peer_access(npu, peer, enabled);
}
}  // namespace
ACL_API(keeps, aclrtDeviceEnablePeerAccess, (int32_t peer, uint32_t flags), {
  check(flags == 0, kInvalidParam, "flags are ", flags, "; allowed: 0");
  enable_peer(peer, true);
})
ACL_API(keeps, aclrtDeviceDisablePeerAccess, (int32_t peer), { enable_peer(peer, false); })
ACL_API(answers, aclrtDevicePeerAccessStatus, (int32_t id, int32_t peer, int32_t* enabled),
    { *enabled = device(id).id != device(peer).id && peer_access(id, peer); })
ACL_API(answers, aclrtDeviceGetBareTgid, (int32_t* pid), { *pid = getpid(); })
// aclrtFloatOverflowMode: 0 saturates, 1 keeps infinities and NaNs, which is what ATen does.
ACL_API(nothing("infinities and NaNs are kept, the only supported mode keeps them"),
    aclrtSetDeviceSatMode, (int32_t mode), {
      check_emulated(mode == 1, kUnsupported, "overflow mode ", mode,
          " is not emulated; 1, infinities and NaNs, is");
    })
ACL_API(nothing("a processor takes longer than an NPU's limits allow"), aclrtSetOpExecuteTimeOut,
    (uint32_t), {})
ACL_API(answers, aclrtSetOpExecuteTimeOutV2, (uint64_t, Nullable<uint64_t> actual), {
  if (actual) *actual = UINT64_MAX;  // no limit is in force
})

// Driver call (libascend_hal.so): counts all NPUs. Used by torch.npu.device_count()
// (torch_npu/npu/__init__.py).
ACL_API(answers, drvGetDevNum, (uint32_t* count), { *count = static_cast<uint32_t>(npu_count()); })

// System parameters (such as the determinism level) are stored; unset ones read 0.
namespace {
void set_parameter(int32_t option, int64_t value) {
  std::lock_guard lock(runtime().parameters_mutex);
  runtime().parameters[option] = value;
}
}  // namespace
ACL_API(
    keeps, aclrtSetSysParamOpt, (int32_t option, int64_t value), { set_parameter(option, value); })
ACL_API(keeps, aclrtCtxSetSysParamOpt, (int32_t option, int64_t value),
    { set_parameter(option, value); })
ACL_API(answers, aclrtGetSysParamOpt, (int32_t option, int64_t* value), {
  std::lock_guard lock(runtime().parameters_mutex);
  *value = runtime().parameters[option];
})

// aclDeviceInfo: 0 cube (AI) cores, 1 vector cores, 2 bytes of L2 (used by torch_npu's
// NPUFunctions.cpp).
ACL_API(answers, aclGetDeviceCapability, (uint32_t id, int32_t what, int64_t* value), {
  device(static_cast<int>(id));
  const int64_t known[] = {chip().cube_cores, chip().vector_cores, chip().l2};
  check_emulated(what >= 0 && what < 3, kInvalidParam, "capability ", what, " is not emulated");
  *value = known[what];
})
// aclrtDevAttr, the public enumeration (CANN's API reference, "aclrtDevAttr").
ACL_API(answers, aclrtGetDeviceInfo, (uint32_t id, int32_t what, int64_t* value), {
  const auto& npu = device(static_cast<int>(id));
  switch (what) {
    case 101:  // AI cores, which are the cube cores
    case 102: *value = chip().cube_cores; return;
    case 201: *value = chip().vector_cores; return;
    case 301: *value = static_cast<int64_t>(npu.capacity()); return;
    case 302: *value = chip().l2; return;
  }
  raise(kUnsupported, {"attribute ", what, " is not emulated"}, /*own=*/true);
})
// Sixteen bytes: the machine's, and in the last one the NPU's number on it.
ACL_API(answers, aclrtDeviceGetUuid, (int32_t id, char* uuid), {
  std::memcpy(uuid, machine_id().data(), 16);
  uuid[15] = static_cast<char>(physical_id(id));
})
// Percentages of cube, vector and AI CPU: whether tasks run now. Memory has no rate: -1 (CANN's
// documentation).
ACL_API(answers, aclrtGetDeviceUtilizationRate, (int32_t id, int32_t* rates), {
  const auto streams = streams_of(device(id).id);
  const int busy =
      std::any_of(streams.begin(), streams.end(), [](const auto& each) { return !each->idle(); })
          ? 100
          : 0;
  const int32_t found[] = {busy, busy, 0, -1};
  std::copy(std::begin(found), std::end(found), rates);
})

ACL_VALUE(const char*, answers, aclGetRecentErrMsg, (), { return take_message(); })
// Of the calling thread, the only level.
ACL_VALUE(int, answers, aclrtGetLastError, (int32_t), { return last_error(true); })
ACL_VALUE(int, answers, aclrtPeekAtLastError, (int32_t), { return last_error(false); })

ACL_VALUE(const char*, answers, aclrtGetSocName, (), { return chip().name.c_str(); })

// torch_npu queries ACL_CANN_ATTR_INF_NAN only: infinities and NaNs are kept.
ACL_API(answers, aclGetCannAttribute, (int32_t, int32_t* value), { *value = 1; })
// Which of its sequences of random numbers an NPU draws, 0 or 1 (op-plugin's RandomUtil.h). Not an
// operator: one function.
ACL_API(nothing("the emulator's random numbers are its own"), aclnnSetPytorchRandom, (int32_t mode),
    { check(mode == 0 || mode == 1, kInvalidParam, "mode is ", mode, "; allowed: 0 and 1"); })
// aclCannAttr: ACL_CANN_ATTR_INF_NAN and ACL_CANN_ATTR_JIT_COMPILE, which is whether compiling at
// run time can be off.
ACL_API(answers, aclGetCannAttributeList, (const int32_t** attributes, size_t* count), {
  static constexpr int32_t available[] = {0, 1};
  *attributes = available;
  *count = std::size(available);
})

// Versions. The structure is in CANN's public API reference ("aclCANNPackageVersion"), as is the
// numbering of packages; the last one, the driver, has a version where `ascend-emulator run
// --driver` gives it.
namespace {
struct PackageVersion {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};
constexpr int32_t kDriver = 7;
}  // namespace
ACL_API(answers, aclsysGetCANNVersion, (int32_t package, PackageVersion* version), {
  const char* driver = std::getenv("ASCEND_EMULATOR_DRIVER");
  check(package >= 0 && package < kDriver + (driver != nullptr), kUnsupported, "package ", package,
      " has no version");
  const std::string given = package == kDriver ? driver : CANN_VERSION;
  *version = {};
  given.copy(version->version, sizeof version->version - 1);
  char* const parts[] = {version->major, version->minor, version->release};
  std::stringstream numbers(given);
  for (char* part : parts) numbers.getline(part, sizeof version->major, '.');
  std::strcpy(version->patch, "0");
})
ACL_API(answers, aclsysGetVersionStr, (const char*, char* version),
    { std::strcpy(version, CANN_VERSION); })
