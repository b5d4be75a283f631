// aclInit and the device, context and version calls. Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp and
// NPUFunctions.cpp (Ascend/pytorch, BSD), CANN's public API reference "AscendCL".
#include "core/device.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "core/registry.h"
#include "core/stream.h"

using namespace emu;

// Of the configuration file only {"defaultDevice": {"default_device": "0"}} is used: threads without a device then use it
// implicitly (CANN's documentation, "Initialization"). The other settings concern dumps and profiling.
ACL_API(keeps, aclInit, (const char* path), {
  // torch_npu's release_thread polls every microsecond. A timer slack of 1 ms for threads started from here leaves the CPU to the
  // operators.
  prctl(PR_SET_TIMERSLACK, 1000000ul);
  if (!path) return;
  std::ifstream file(path);
  const std::string config{std::istreambuf_iterator<char>(file), {}};
  const char* const key = "\"default_device\"";
  int number = 0;
  const auto place = config.find(key);
  if (place != std::string::npos && std::sscanf(config.c_str() + place + std::strlen(key), " : \"%d\"", &number) == 1)
    set_default_device(number);
})
ACL_API(nothing("streams end and memory is released at the process's exit"), aclFinalize, (), {})
ACL_API(answers, aclrtGetDeviceCount, (uint32_t* count), { *count = device_count(); })
ACL_API(keeps, aclrtSetDevice, (int32_t id), { set_current_device(id); })
ACL_API(nothing("streams end and memory is released at the process's exit"), aclrtResetDevice, (int32_t id), { device(id); })
ACL_API(answers, aclrtGetDevice, (int32_t* id), {
  check(has_current_device(), kContextNull, "no device was set in this thread");
  *id = current_device();
})
ACL_API(answers, aclrtGetLogicDevIdByUserDevId, (int32_t user, int32_t* logical), { *logical = user; })
// One primary context per device; its handle is the device.
ACL_API(answers, aclrtGetCurrentContext, (void** context), { *context = &device(current_device()); })
ACL_API(keeps, aclrtSetCurrentContext, (void* context), {
  check(context != nullptr, kInvalidParam, "the context is null");
  set_current_device(static_cast<Device*>(context)->id);
})
ACL_API(answers, aclrtGetPrimaryCtxState, (int32_t id, uint32_t* flags, int32_t* active), {
  if (flags) *flags = 0;
  *active = device(id).active;
})
ACL_API(answers, aclrtDeviceCanAccessPeer, (int32_t* can, int32_t, int32_t), { *can = 1; })
ACL_API(nothing("all NPUs of a process share its address space"), aclrtDeviceEnablePeerAccess, (int32_t, uint32_t), {})
ACL_API(answers, aclrtDeviceGetBareTgid, (int32_t* pid), { *pid = getpid(); })
// aclrtFloatOverflowMode: 0 saturates, 1 keeps infinities and NaNs, which is what ATen does.
ACL_API(nothing("infinities and NaNs are kept, the only supported mode keeps them"), aclrtSetDeviceSatMode, (int32_t mode),
    { check(mode == 1, kUnsupported, "overflow mode ", mode, " is not emulated; 1, infinities and NaNs, is"); })
ACL_API(nothing("a processor takes longer than an NPU's limits allow"), aclrtSetOpWaitTimeout, (uint32_t), {})
ACL_API(nothing("a processor takes longer than an NPU's limits allow"), aclrtSetOpExecuteTimeOut, (uint32_t), {})
ACL_API(answers, aclrtSetOpExecuteTimeOutV2, (uint64_t timeout, uint64_t* actual), {
  if (actual) *actual = timeout;
})

// System parameters (such as the determinism level) are stored; unset ones read 0.
namespace {
std::mutex parameters_mutex;
std::map<int32_t, int64_t> parameters;
void set_parameter(int32_t option, int64_t value) {
  std::lock_guard lock(parameters_mutex);
  parameters[option] = value;
}
}  // namespace
ACL_API(keeps, aclrtSetSysParamOpt, (int32_t option, int64_t value), { set_parameter(option, value); })
ACL_API(keeps, aclrtCtxSetSysParamOpt, (int32_t option, int64_t value), { set_parameter(option, value); })
ACL_API(answers, aclrtGetSysParamOpt, (int32_t option, int64_t* value), {
  std::lock_guard lock(parameters_mutex);
  *value = parameters[option];
})

// aclDeviceInfo: 0 cube (AI) cores, 1 vector cores, 2 bytes of L2 (used by torch_npu's NPUFunctions.cpp).
ACL_API(answers, aclGetDeviceCapability, (uint32_t id, int32_t what, int64_t* value), {
  device(static_cast<int>(id));
  const int64_t known[] = {chip().cube_cores, chip().vector_cores, chip().l2};
  check(what >= 0 && what < 3, kInvalidParam, "capability ", what, " is not emulated");
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
  throw Error(kUnsupported, text("attribute ", what, " is not emulated"));
})
// Sixteen bytes, different for each NPU.
ACL_API(answers, aclrtDeviceGetUuid, (int32_t id, char* uuid), {
  std::memcpy(uuid, "ascend-emulator", 16);
  uuid[15] = static_cast<char>(device(id).id);
})
ACL_API(answers, aclrtGetDeviceUtilizationRate, (int32_t id, void* rates), {
  device(id);
  std::memset(rates, 0, 4 * sizeof(int32_t));  // cube, vector, AI CPU, memory: in percent
})

// Errors are reported by the failing call only.
ACL_API(nothing("errors are reported by the call that fails"), aclrtGetLastError, (int32_t), {})
ACL_API(nothing("errors are reported by the call that fails"), aclrtPeekAtLastError, (int32_t), {})

ACL_VALUE(const char*, answers, aclrtGetSocName, (), { return chip().name.c_str(); })

// torch_npu queries ACL_CANN_ATTR_INF_NAN only: infinities and NaNs are kept.
ACL_API(answers, aclGetCannAttribute, (int32_t, int32_t* value), { *value = 1; })

// Versions. The structure is in CANN's public API reference ("aclCANNPackageVersion"), as is the numbering of packages; the last
// one, the driver, does not exist.
namespace {
struct PackageVersion {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};
constexpr int32_t kDriver = 7;
}  // namespace
ACL_API(answers, aclsysGetCANNVersion, (int32_t package, PackageVersion* version), {
  check(package >= 0 && package < kDriver, kUnsupported, "package ", package, " has no version");
  *version = {CANN_VERSION};
  char* const parts[] = {version->major, version->minor, version->release};
  std::stringstream numbers(CANN_VERSION);
  for (char* part : parts) numbers.getline(part, sizeof version->major, '.');
  std::strcpy(version->patch, "0");
})
ACL_API(answers, aclsysGetVersionStr, (const char*, char* version), { std::strcpy(version, CANN_VERSION); })
