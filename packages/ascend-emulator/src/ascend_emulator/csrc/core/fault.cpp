// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "fault.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "registry.h"
#include "stream.h"

namespace emu::fault {

std::atomic<bool> any{std::getenv("ASCEND_EMULATOR_FAULTS") != nullptr};

namespace {

struct Fault {
  std::string text, name;
  uint64_t nth = 1, calls = 0;
  bool from_then_on = false;
  Kind kind = Kind::none;
  int code = 0;
};
std::mutex mutex;
std::vector<Fault>& faults() {  // never destroyed: torch_npu makes calls during exit
  static auto* all = new std::vector<Fault>;
  return *all;
}
std::string& complaint() {
  static auto* text = new std::string;
  return *text;
}
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

  const bool word = fault.name == "stream" || fault.name == "collective" || fault.name == "memory";
  check(word || registered(fault.name.c_str()), kInvalidParam, "the fault '", text,
      "': ", fault.name,
      " is no entry point that is emulated, nor one of stream, collective, memory");
  const bool collective = fault.name == "collective" || is_collective(fault.name);
  check((fault.kind != Kind::timeout && fault.kind != Kind::drop) || collective, kInvalidParam,
      "the fault '", text, "': only a collective can ", kind);
  check((fault.kind == Kind::hang) == (fault.name == "stream") ||
            (fault.kind == Kind::hang && (collective || starts(fault.name, "aclnn"))),
      kInvalidParam, "the fault '", text,
      "': only a stream, an operator or a collective can hang, and a stream can do nothing else");
  return fault;
}

void inject(const std::string& list) {
  std::vector<Fault> parsed;
  std::stringstream items(list);
  for (std::string item; std::getline(items, item, ';');)
    if (!item.empty()) parsed.push_back(parse(item));
  std::lock_guard lock(mutex);
  faults().insert(faults().end(), parsed.begin(), parsed.end());
  if (!parsed.empty()) any = true;
}

// Reads ASCEND_EMULATOR_FAULTS at the first call, when all entry points are registered.
void read_environment() {
  static const bool once = [] {
    try {
      if (const char* list = std::getenv("ASCEND_EMULATOR_FAULTS")) inject(list);
    } catch (const Error& error) { complaint() = text("ASCEND_EMULATOR_FAULTS: ", error.what()); }
    return true;
  }();
  (void)once;
  check(complaint().empty(), kInvalidParam, complaint());
}

// Counts the call and returns the fault that is due, if any.
Fault due(const char* name) {
  read_environment();
  std::lock_guard lock(mutex);
  Fault found;
  for (auto& fault : faults()) {
    if (!covers(fault.name, name)) continue;
    ++fault.calls;
    if (fault.calls == fault.nth || (fault.from_then_on && fault.calls > fault.nth)) found = fault;
  }
  return found;
}

}  // namespace

void at(const char* name) {
  const auto fault = due(name);
  left_to_do = Kind::none;
  switch (fault.kind) {
    case Kind::none: return;
    case Kind::oom: throw Error(kOutOfMemory, text("out of memory (injected: ", fault.text, ")"));
    case Kind::ecc:
      if (has_current_device()) device(current_device()).inject_memory_error();
      throw Error(
          kEccError, text("multi-bit ECC error in the NPU's memory (injected: ", fault.text, ")"));
    case Kind::uce:
      if (has_current_device()) device(current_device()).inject_memory_error();
      throw Error(kMemoryError,
          text("uncorrectable error in the NPU's memory (injected: ", fault.text, ")"));
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

void hang() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    check_not_aborted();
  }
}

}  // namespace emu::fault

// Inject faults in the syntax of ASCEND_EMULATOR_FAULTS, and clear all of them. Called by
// ascend_emulator.faults.
EXPORT int ascend_emulator_inject(const char* list) {
  return emu::guarded("ascend_emulator_inject", [&] { emu::fault::inject(list); });
}
EXPORT void ascend_emulator_clear_faults() {
  std::lock_guard lock(emu::fault::mutex);
  emu::fault::faults().clear();
  emu::fault::complaint().clear();
  emu::fault::any = false;
}
