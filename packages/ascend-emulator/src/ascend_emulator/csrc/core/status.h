// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Error codes, and error messages as aclGetRecentErrMsg returns them.
//
// The codes are public; torch_npu documents them in torch_npu/csrc/core/npu/NPUErrorCodes.h
// (Ascend/pytorch, BSD).
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emu {

enum Status : int {
  kOk = 0,
  kInvalidParam = 100000,
  kInvalidDevice = 107001,
  kContextNull = 107002,
  kNotThisStream = 107003,
  kCaptureDependency = 107024,
  kStreamCaptured = 107027,
  kEventCaptured = 107028,
  kNotCaptured = 107029,
  kCaptureMode = 107030,
  kCaptureUnmatched = 107036,
  kCaptureThread = 107038,
  kCaptureBlocks = 107041,
  kNoResource = 207005,
  kNoStream = 207008,
  kReportTimeout = 507012,
  kStreamSyncTimeout = 507046,
  kEventSyncTimeout = 507047,
  kCaptureInvalidated = 507903,
  kUninitialized = 100001,
  kRepeatInit = 100002,
  kRepeatFinalize = 100037,
  kUnsupported = 200006,
  kOutOfMemory = 207001,
  kNoPermission = 207006,
  kMemoryError = 507053,
  kEccError = 507054,
  kOpNull = 161001,
  kOpParam = 161002,
  kOpFailed = 361001,
};

// Thrown inside an entry point; turned into its status code and message at the C boundary.
struct Error : std::runtime_error {
  Status status;
  bool classed;  // the text says who refuses: a rule, the emulator, or nothing: a state
  Error(Status s, const std::string& what, bool classed = false)
      : std::runtime_error(what), status(s), classed(classed) {}
};

// Classes of refusals outside of rules. The third, check_emulated's, is in the text itself.
inline constexpr const char *kRefused = "CANN refuses, inferred",
                            *kUndefined = "undefined on the device";
// The error with its class, if it has none yet and is not a state: memory, a timeout, a fault.
Error classified(const Error& error, const char* otherwise);

// Type-erased reference to a value with operator<<, so that the functions below are not
// instantiated for each list of types.
class Printable {
 public:
  template <class T> Printable(const T& value)
      : value_(&value),
        print_([](std::ostream& out, const void* at) { out << *static_cast<const T*>(at); }) {}
  Printable(const char* value)
      : value_(value),
        print_([](std::ostream& out, const void* at) { out << static_cast<const char*>(at); }) {}
  Printable(const c10::ScalarType& value);  // PyTorch's and CANN's name: Double (DT_DOUBLE)
  friend std::ostream& operator<<(std::ostream& out, const Printable& part) {
    part.print_(out, part.value_);
    return out;
  }

 private:
  const void* value_;
  void (*print_)(std::ostream&, const void*);
};
std::string joined(std::initializer_list<Printable> parts);

template <class... Parts> [[gnu::always_inline]] inline std::string text(const Parts&... parts) {
  return joined({Printable(parts)...});
}

std::string hex(uint64_t value);
// The values, separated by commas.
std::string listed(const std::vector<Printable>& values);
template <class Range> std::string listed(const Range& values) {
  if constexpr (std::is_same_v<std::decay_t<decltype(*values.begin())>, c10::ScalarType>) {
    std::vector<Printable> names;
    for (const auto each : values) names.emplace_back(c10::toString(each));
    return listed(names);
  } else {
    return listed(std::vector<Printable>(values.begin(), values.end()));
  }
}

// Stores the calling thread's message and returns the code.
int fail(Status status, const std::string& message);

// Status of the calling thread's last failure, kOk if there was none since it was cleared.
int last_error(bool clear);

// Returns the calling thread's last message and clears it, as torch_npu expects
// (c10_npu_get_error_message); null if there is none.
const char* take_message();
const std::string& last_message();

// Converts an exception to a status and a message, without c10::Error's backtrace.
Error error_of(const std::exception& e);

// Runs `body` and converts exceptions to a status; the message starts with the entry point's name.
int guarded(const char* name, c10::function_ref<void()> body) noexcept;

// `own`: the emulator refuses, not CANN, and the text says it.
[[noreturn]] void raise(Status status, std::initializer_list<Printable> parts, bool own = false);

template <class... Parts>
[[gnu::always_inline]] inline void check(bool ok, Status status, const Parts&... parts) {
  if (!ok) [[unlikely]]
    raise(status, {Printable(parts)...});
}
// Of what an NPU takes and the emulator does not, and of the emulator's own variables.
template <class... Parts>
[[gnu::always_inline]] inline void check_emulated(bool ok, Status status, const Parts&... parts) {
  if (!ok) [[unlikely]]
    raise(status, {Printable(parts)...}, /*own=*/true);
}

}  // namespace emu
