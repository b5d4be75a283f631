// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "fault.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "device.h"
#include "names.h"
#include "process.h"

namespace emu::fault {

namespace {

struct Fault {
  std::string text, name;
  uint64_t nth = 1, calls = 0;
  bool from_then_on = false;
  Kind kind = Kind::none;
  int code = 0;
};
struct Faults {
  std::mutex mutex;
  std::vector<Fault> all;
  std::atomic<bool> any{std::getenv("ASCEND_EMULATOR_FAULTS") != nullptr};
};
Faults& faults() { return process.part<Faults>(); }
thread_local Kind left_to_do = Kind::none;

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

bool is_collective(const std::string& name) {
  if (!starts(name, "Hccl")) return false;
  for (const char* other : {"HcclComm", "HcclGet", "HcclSet", "HcclGroup", "HcclCreate"})
    if (starts(name, other)) return false;
  return true;
}

// `aclrtMalloc` includes aclrtMallocAlign32, which torch_npu calls.
bool covers(const std::string& name, const std::string& called) {
  if (name == called) return true;
  if (name == "aclrtMalloc") return called == "aclrtMallocAlign32";
  if (name == "memory")
    return called == "aclrtMalloc" || called == "aclrtMallocAlign32" ||
           called == "aclrtMallocPhysical";
  return name == "collective" && is_collective(called);
}

Fault parse(const std::string& text) {
  Fault fault{.text = text};
  const auto at = text.find('@'), equals = text.find('=', at == std::string::npos ? 0 : at);
  check(at != std::string::npos && equals != std::string::npos, kInvalidParam, "the fault '", text,
      "' is not NAME@N=KIND, such as aclrtMalloc@3=oom");
  fault.name = text.substr(0, at);
  std::string nth = text.substr(at + 1, equals - at - 1), kind = text.substr(equals + 1);
  if (!nth.empty() && nth.back() == '+') {
    fault.from_then_on = true;
    nth.pop_back();
  }
  const auto number = [&](const std::string& digits, const char* what) {
    check(!digits.empty() && digits.size() < 10 &&
              digits.find_first_not_of("0123456789") == std::string::npos && std::stoi(digits) > 0,
        kInvalidParam, "the fault '", text, "': ", what, " is '", digits,
        "'; it must be a number from 1");
    return std::stoi(digits);
  };
  fault.nth = number(nth, "which call");
  if (starts(kind, "error=")) {
    fault.code = number(kind.substr(6), "the error's code");
    kind = "error";
  }
  const char* const kinds[] = {"", "oom", "ecc", "uce", "error", "hang", "timeout", "drop"};
  for (int i = 1; i < static_cast<int>(std::size(kinds)); ++i)
    if (kind == kinds[i]) fault.kind = static_cast<Kind>(i);
  check(fault.kind != Kind::none && (fault.kind != Kind::error || fault.code), kInvalidParam,
      "the fault '", text, "': '", kind,
      "' is no kind; allowed: oom, ecc, uce, error=CODE, hang, timeout, drop");

  const std::vector<std::string> words = {"stream", "collective", "memory"};
  const bool word = std::count(words.begin(), words.end(), fault.name) != 0;
  if (!word && !names::emulated(fault.name)) {
    check(!names::callable(fault.name), kInvalidParam, "the fault '", text, "': ", fault.name,
        " is not emulated, and fails by itself");
    raise(kInvalidParam,
        {"the fault '", text, "': ", fault.name, " is no entry point, nor one of ", listed(words),
            names::hint(fault.name, words), "; `ascend-emulator coverage` lists them"});
  }
  const bool collective = fault.name == "collective" || is_collective(fault.name);
  const bool is_operator = starts(fault.name, "aclnn") || starts(fault.name, "aclop::") ||
                           starts(fault.name, "atb::") || starts(fault.name, "Atb");
  check((fault.kind != Kind::timeout && fault.kind != Kind::drop) || collective, kInvalidParam,
      "the fault '", text, "': only a collective can ", kind);
  check((fault.kind == Kind::hang) == (fault.name == "stream") ||
            (fault.kind == Kind::hang && (collective || is_operator)),
      kInvalidParam, "the fault '", text,
      "': only a stream, an operator or a collective can hang, and a stream can do nothing else");
  return fault;
}

void inject(const std::string& list) {
  std::vector<Fault> parsed;
  std::stringstream items(list);
  for (std::string item; std::getline(items, item, ';');)
    if (!item.empty()) parsed.push_back(parse(item));
  std::lock_guard lock(faults().mutex);
  faults().all.insert(faults().all.end(), parsed.begin(), parsed.end());
  if (!parsed.empty()) faults().any = true;
}

// Counts the call and returns the fault that is due, if any.
Fault due(const char* name) {
  std::lock_guard lock(faults().mutex);
  Fault found;
  for (auto& fault : faults().all) {
    if (!covers(fault.name, name)) continue;
    ++fault.calls;
    if (fault.calls == fault.nth || (fault.from_then_on && fault.calls > fault.nth)) found = fault;
  }
  return found;
}

}  // namespace

std::string read_environment() {
  try {
    if (const char* list = std::getenv("ASCEND_EMULATOR_FAULTS")) inject(list);
    return "";
  } catch (const Error& error) { return text(error.what(), " (ASCEND_EMULATOR_FAULTS)"); }
}

bool armed() { return faults().any.load(std::memory_order_relaxed); }

void at(const char* name) {
  const auto fault = due(name);
  left_to_do = Kind::none;
  switch (fault.kind) {
    case Kind::none: return;
    case Kind::oom: raise(kOutOfMemory, {"out of memory (injected: ", fault.text, ")"});
    case Kind::ecc:
      if (has_current_device()) device(current_device()).inject_memory_error();
      raise(kEccError, {"multi-bit ECC error in the NPU's memory (injected: ", fault.text, ")"});
    case Kind::uce:
      if (has_current_device()) device(current_device()).inject_memory_error();
      raise(kMemoryError, {"uncorrectable error in the NPU's memory (injected: ", fault.text, ")"});
    case Kind::error:
      throw Error(static_cast<Status>(fault.code),
          text("error ", fault.code, " (injected: ", fault.text, ")"));
    default: left_to_do = fault.kind;
  }
}

Kind pending() { return std::exchange(left_to_do, Kind::none); }

bool hangs() {
  if (left_to_do == Kind::hang) return pending() == Kind::hang;
  return due("stream").kind == Kind::hang;
}

}  // namespace emu::fault

// Inject faults in the syntax of ASCEND_EMULATOR_FAULTS, and clear all of them. Called by
// ascend_emulator.faults.
EXPORT int ascend_emulator_inject(const char* list) {
  return emu::guarded("ascend_emulator_inject", [&] { emu::fault::inject(list); });
}
EXPORT void ascend_emulator_clear_faults() {
  auto& faults = emu::fault::faults();
  std::lock_guard lock(faults.mutex);
  faults.all.clear();
  faults.any = false;
}
