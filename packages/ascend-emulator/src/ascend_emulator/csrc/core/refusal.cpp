// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "refusal.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "entry_point.h"
#include "fault.h"
#include "complaint.h"

namespace emu {
namespace {
bool of_atb(const char* name) { return std::strncmp(name, "Atb", 3) == 0; }

// ASCEND_EMULATOR_LACKS: operators that the chip does not have, separated by commas.
bool lacking(const char* name) {
  const char* list = std::getenv("ASCEND_EMULATOR_LACKS");
  return list && text(",", list, ",").find(text(",", name, ",")) != std::string::npos;
}
}  // namespace

int refuse(const char* name) {
  const char* soc = std::getenv("ASCEND_EMULATOR_SOC");
  const bool is_aclnn = std::strncmp(name, "aclnn", 5) == 0;
  const int status = fail(kUnsupported,
      lacking(name)
          ? text(name, " is not an operator of ", soc ? soc : "this chip",
                ", by torch_npu's documentation.")
          : text(name, " is not emulated; `ascend-emulator coverage` lists what is",
                is_aclnn
                    ? "; fix: say what it computes, in a file of Python or C++ that "
                      "ASCEND_EMULATOR_OPERATORS names (docs/emulator.md#operators-of-your-own)"
                    : ""));
  return is_aclnn || of_atb(name) ? operator_done(name, status) : status;
}

long refuse_value(const char* name) {
  refuse(name);
  std::fprintf(stderr, "%s\n", last_message().c_str());
  return 0;
}

void refuse_engine(const char* name) {
  throw std::runtime_error(text(name,
      " of CANN's graph engine is not emulated; supported: torchair's mode reduce-overhead; "
      "fix: CompilerConfig().mode = \"reduce-overhead\""));
}

namespace {
struct Failures {
  std::mutex mutex;
  std::map<int, std::string> on_queue;  // NPU -> operator
};

// torch_npu's queue thread, by its name (torch_npu/csrc/core/npu/NPUAffinityController.cpp, BSD).
bool on_queue_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strcmp(name, "acl_thread") == 0;
}
}  // namespace

thread_local std::optional<Error> creation_error;

int operator_done(const char* name, int status) {
  creation_error.reset();
  // torch_npu raises no message for these operators' GetWorkspaceSize, so it is printed.
  if (status != kOk && of_atb(name)) std::fprintf(stderr, "%s\n", last_message().c_str());
  if (status != kOk && on_queue_thread()) {
    auto& failures = process.part<Failures>();
    std::lock_guard lock(failures.mutex);
    failures.on_queue.emplace(has_current_device() ? current_device() : kNoNpu, name);
  }
  return status;
}

void check_queue(int device) {
  auto& failures = process.part<Failures>();
  std::lock_guard lock(failures.mutex);
  for (const auto& [npu, name] : failures.on_queue) {
    check(npu != device && npu != kNoNpu, kOpFailed, name,
        " failed earlier, and torch_npu computes nothing more on NPU ", device,
        " in this process; start a new one");
  }
}

int intercepted(const char* name, c10::function_ref<void()> body, const char* shown) noexcept {
  static const bool ready = complaint().empty();
  if (ready && removed(name)) return refuse(name);
  return guarded(shown ? shown : name, [&] {
    check_emulated(ready, kInvalidParam, complaint());
    if (fault::armed()) [[unlikely]]
      fault::at(name);
    body();
  });
}

}  // namespace emu
