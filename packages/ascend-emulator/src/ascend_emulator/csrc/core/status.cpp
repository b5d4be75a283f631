// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "device.h"
#include "registry.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace emu {
namespace {
thread_local std::string last_message;
thread_local std::string returned_message;
thread_local int last_status = kOk;
}  // namespace

int fail(Status status, const std::string& message) {
  last_message = "[ascend-emulator] " + message;
  return last_status = status;
}

int last_error(bool clear) { return clear ? std::exchange(last_status, kOk) : last_status; }

namespace {
const char* cann_name(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return "DT_FLOAT";
    case c10::ScalarType::Half: return "DT_FLOAT16";
    case c10::ScalarType::BFloat16: return "DT_BFLOAT16";
    case c10::ScalarType::Double: return "DT_DOUBLE";
    case c10::ScalarType::Byte: return "DT_UINT8";
    case c10::ScalarType::Char: return "DT_INT8";
    case c10::ScalarType::Short: return "DT_INT16";
    case c10::ScalarType::Int: return "DT_INT32";
    case c10::ScalarType::Long: return "DT_INT64";
    case c10::ScalarType::Bool: return "DT_BOOL";
    case c10::ScalarType::ComplexHalf: return "DT_COMPLEX32";
    case c10::ScalarType::ComplexFloat: return "DT_COMPLEX64";
    case c10::ScalarType::ComplexDouble: return "DT_COMPLEX128";
    default: return nullptr;
  }
}
}  // namespace

Printable::Printable(const c10::ScalarType& value)
    : value_(&value), print_([](std::ostream& out, const void* at) {
        const auto type = *static_cast<const c10::ScalarType*>(at);
        out << c10::toString(type);
        if (const char* name = cann_name(type)) out << " (" << name << ")";
      }) {}

std::string joined(std::initializer_list<Printable> parts) {
  std::ostringstream out;
  for (const auto& part : parts) out << part;
  return out.str();
}

std::string listed(const std::vector<Printable>& values) {
  std::ostringstream out;
  const char* separator = "";
  for (const auto& value : values) {
    out << separator << value;
    separator = ", ";
  }
  return out.str();
}

std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%llx", static_cast<unsigned long long>(value));
  return digits;
}

void raise(Status status, std::initializer_list<Printable> parts) {
  throw Error(status, joined(parts));
}

Error error_of(const std::exception& e) {
  if (const auto* own = dynamic_cast<const Error*>(&e)) return *own;
  const std::string what = e.what();
  return {kOpFailed, what.substr(0, what.find("\nException raised from"))};
}

std::atomic<bool> forked{false};

int guarded(const char* name, c10::function_ref<void()> body) noexcept {
  try {
    check(!forked, kContextNull,
        "this process was forked from one that uses NPUs, and cannot use them; start it with the "
        "method spawn");
    body();
    return kOk;
  } catch (const std::exception& e) {
    const auto error = error_of(e);
    return fail(error.status, text(name, ": ", error.what()));
  }
}

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
  const int status = fail(kUnsupported,
      lacking(name) ? text(name, " is not an operator of ", soc ? soc : "this chip",
                          ", by torch_npu's documentation.")
                    : text(name, " is not emulated. `ascend-emulator coverage` lists what is."));
  return std::strncmp(name, "aclnn", 5) == 0 || of_atb(name) ? operator_done(name, status) : status;
}

long refuse_value(const char* name) {
  refuse(name);
  std::fprintf(stderr, "%s\n", last_message.c_str());
  return 0;
}

void refuse_engine(const char* name) {
  throw std::runtime_error(text(name,
      " of CANN's graph engine is not emulated; supported: torchair's mode reduce-overhead; "
      "fix: CompilerConfig().mode = \"reduce-overhead\""));
}

namespace {
std::mutex failure_mutex;
std::map<int, std::string> failed_on_queue;  // NPU -> operator

// torch_npu's queue thread, by its name (torch_npu/csrc/core/npu/NPUAffinityController.cpp, BSD).
bool on_queue_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strcmp(name, "acl_thread") == 0;
}
}  // namespace

thread_local std::string creation_error;

int operator_done(const char* name, int status) {
  creation_error.clear();
  // torch_npu raises no message for these operators' GetWorkspaceSize, so it is printed.
  if (status != kOk && of_atb(name)) std::fprintf(stderr, "%s\n", last_message.c_str());
  if (status != kOk && on_queue_thread()) {
    std::lock_guard lock(failure_mutex);
    failed_on_queue.emplace(has_current_device() ? current_device() : kNoNpu, name);
  }
  return status;
}

void check_queue(int device) {
  std::lock_guard lock(failure_mutex);
  for (const auto& [npu, name] : failed_on_queue) {
    check(npu != device && npu != kNoNpu, kOpFailed, name,
        " failed earlier, and torch_npu computes nothing more on NPU ", device,
        " in this process; start a new one");
  }
}

}  // namespace emu

// Returns the calling thread's last message and clears it, as torch_npu expects
// (c10_npu_get_error_message).
ACL_VALUE(const char*, answers, aclGetRecentErrMsg, (), {
  using namespace emu;
  returned_message.swap(last_message);
  last_message.clear();
  return returned_message.empty() ? nullptr : returned_message.c_str();
})
