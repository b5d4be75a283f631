// Profiling and logging hooks that torch_npu links against or loads (libmsprofiler.so). torch_npu's profiler records host events
// itself. Device data, which CANN's msprof converts to a timeline, is not written; use the emulator's trace (core/trace.h).
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "core/registry.h"

using emu::Error, emu::kInvalidParam, emu::kRepeatInit, emu::nothing;

namespace {
struct Config {};
bool initialized = false, started = false;

void known(const void* config) {
  if (!config) throw Error(kInvalidParam, "profilerConfig is null");
  if (!initialized) throw Error(kInvalidParam, "aclprofInit did not come before");
}
}  // namespace

// CANN's API reference, "Profiling data collection".
ACL_API(keeps, aclprofInit, (const char* path, size_t length), {
  if (!path || !length) throw Error(kInvalidParam, "profilerResultPath is empty");
  if (std::exchange(initialized, true)) throw Error(kRepeatInit, "profiling is initialized already");
})
ACL_API(keeps, aclprofFinalize, (), {
  if (!std::exchange(initialized, false)) throw Error(kInvalidParam, "aclprofInit did not come before");
})
ACL_API(keeps, aclprofStart, (const void* config), {
  known(config);
  if (std::exchange(started, true)) throw Error(kInvalidParam, "profiling is started already");
  static const bool told = std::fputs(
      "ascend-emulator: profiling: the profile will have no device data; `ascend-emulator run --trace FILE` writes a trace\n",
      stderr);
  static_cast<void>(told);
})
ACL_API(keeps, aclprofStop, (const void* config), {
  known(config);
  if (!std::exchange(started, false)) throw Error(kInvalidParam, "aclprofStart did not come before");
})
ACL_VALUE(Config*, keeps, aclprofCreateConfig, (uint32_t*, uint32_t, int, const void*, uint64_t), { return new Config; })
ACL_API(keeps, aclprofDestroyConfig, (const Config* config), {
  if (!config) throw Error(kInvalidParam, "profilerConfig is null");
  delete config;
})
ACL_API(nothing("what it would set is of the device's side"), aclprofSetConfig, (...), {})
ACL_API(nothing("no warm-up is needed: nothing is recorded"), aclprofWarmup, (...), {})
ACL_API(nothing("marks are for the device's side"), aclprofMarkEx, (...), {})

#define QUIET(TYPE, NAME, PARAMS) ACL_VALUE(TYPE, nothing("no profile is being recorded"), NAME, PARAMS, { return TYPE(); })

QUIET(int, MsprofRegisterCallback, (...))
QUIET(int, MsprofReportAdditionalInfo, (...))
QUIET(int, MsprofReportApi, (...))
QUIET(int, MsprofReportCompactInfo, (...))
QUIET(uint64_t, MsprofGetHashId, (...))
QUIET(uint64_t, MsprofSysCycleTime, ())
ACL_VALUE(void, nothing("torch_npu's log goes to its own output as well"), aclAppLog, (...), {})
