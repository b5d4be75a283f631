// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Profiling and logging hooks that torch_npu links against or loads (libmsprofiler.so). A profile
// is a directory PROF_… with the trace of the device's tasks (core/trace.h), from which `msprof
// --export=on` makes timeline and op_summary (tools/profiler/profiler_tool). torch_npu's profiler
// records host events itself.
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "core/entry_point.h"
#include "core/trace.h"

using emu::check, emu::kInvalidParam, emu::kRepeatInit, emu::nothing, emu::text;

namespace {
struct Config {
  std::vector<uint32_t> devices;
};
struct Profiling {
  bool initialized = false, started = false;
  std::string path;
  int number = 0;
};
Profiling& profiling() { return emu::process.part<Profiling>(); }

const Config& known(const void* config) {
  check(config != nullptr, kInvalidParam, "profilerConfig is null");
  check(profiling().initialized, kInvalidParam, "aclprofInit did not come before");
  return *static_cast<const Config*>(config);
}

int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

void make_directory(const std::string& path) {
  check(mkdir(path.c_str(), 0750) == 0 || errno == EEXIST, kInvalidParam, "cannot create ", path);
}

// PROF_number_time_letters/host and device_N, as CANN's tools name them, with the times from which
// torch_npu computes local time (torch_npu/profiler/analysis, BSD).
void make_profile(const std::vector<uint32_t>& devices) {
  char name[80];
  const auto seconds = time(nullptr);
  tm local{};
  localtime_r(&seconds, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d%H%M%S000", &local);
  std::snprintf(name, sizeof name, "/PROF_%06d_%s_%s%08X", ++profiling().number, stamp,
      emu::shows_modelled_time() ? "MODELLED" : "EMULATOR", static_cast<unsigned>(getpid()));
  make_directory(profiling().path);
  const auto directory = profiling().path + name;
  make_directory(directory);
  make_directory(directory + "/host");
  for (const auto device : devices) make_directory(text(directory, "/device_", device));
  if (FILE* info = std::fopen((directory + "/host/start_info").c_str(), "w")) {
    const auto local_time = nanoseconds(CLOCK_REALTIME), raw = nanoseconds(CLOCK_MONOTONIC_RAW),
               steady = nanoseconds(CLOCK_MONOTONIC);
    std::fprintf(info,
        "{\"collectionTimeBegin\": \"%lld.%03lld\", \"clockMonotonicRaw\": \"%lld\", "
        "\"clockMonotonic\": \"%lld\"}\n",
        static_cast<long long>(local_time / 1000), static_cast<long long>(local_time % 1000),
        static_cast<long long>(raw), static_cast<long long>(steady));
    std::fclose(info);
  }
  emu::start_profile(directory + "/host/emulator_trace.json");
}
}  // namespace

// CANN's API reference, "Profiling data collection".
ACL_API(keeps, aclprofInit, (const char* path, size_t length), {
  check(path && length, kInvalidParam, "profilerResultPath is empty");
  check(!std::exchange(profiling().initialized, true), kRepeatInit,
      "profiling is initialized already");
  profiling().path.assign(path, length);
  profiling().path.resize(std::min(profiling().path.find('\0'), profiling().path.size()));
})
ACL_API(keeps, aclprofFinalize, (), {
  check(std::exchange(profiling().initialized, false), kInvalidParam,
      "aclprofInit did not come before");
})
ACL_API(keeps, aclprofStart, (const void* config), {
  const auto& chosen = known(config);
  check(!std::exchange(profiling().started, true), kInvalidParam, "profiling is started already");
  make_profile(chosen.devices);
})
ACL_API(keeps, aclprofStop, (const void* config), {
  known(config);
  check(
      std::exchange(profiling().started, false), kInvalidParam, "aclprofStart did not come before");
  emu::stop_profile();
})
ACL_VALUE(Config*, keeps, aclprofCreateConfig,
    (uint32_t* devices, uint32_t count, int, const void*, uint64_t), {
      return new Config{
          devices ? std::vector<uint32_t>(devices, devices + count) : std::vector<uint32_t>()};
    })
ACL_API(keeps, aclprofDestroyConfig, (const Config* config), {
  check(config != nullptr, kInvalidParam, "profilerConfig is null");
  delete config;
})
ACL_API(nothing("what it would set is of counters that do not exist"), aclprofSetConfig, (...), {})
ACL_API(nothing("no warm-up is needed"), aclprofWarmup, (...), {})
ACL_API(nothing("marks are not recorded"), aclprofMarkEx, (...), {})

#define QUIET(TYPE, NAME, PARAMS) \
  ACL_VALUE(                      \
      TYPE, nothing("CANN's own host events are not recorded"), NAME, PARAMS, { return TYPE(); })

QUIET(int, MsprofRegisterCallback, (...))
QUIET(int, MsprofReportAdditionalInfo, (...))
QUIET(int, MsprofReportApi, (...))
QUIET(int, MsprofReportCompactInfo, (...))
QUIET(uint64_t, MsprofGetHashId, (...))
QUIET(uint64_t, MsprofSysCycleTime, ())
ACL_VALUE(void, nothing("torch_npu's log goes to its own output as well"), aclAppLog, (...), {})
