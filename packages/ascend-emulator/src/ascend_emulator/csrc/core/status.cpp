// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "process.h"

namespace emu {
namespace {
thread_local std::string message_of_last;
thread_local std::string returned_message;
thread_local int last_status = kOk;
}  // namespace

int fail(Status status, const std::string& message) {
  message_of_last = "[ascend-emulator] " + message;
  return last_status = status;
}

int last_error(bool clear) { return clear ? std::exchange(last_status, kOk) : last_status; }

const std::string& last_message() { return message_of_last; }

const char* take_message() {
  returned_message.swap(message_of_last);
  message_of_last.clear();
  return returned_message.empty() ? nullptr : returned_message.c_str();
}

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
    case c10::ScalarType::Bits8: return "DT_HIFLOAT8";
    case c10::ScalarType::Float8_e5m2: return "DT_FLOAT8_E5M2";
    case c10::ScalarType::Float8_e4m3fn: return "DT_FLOAT8_E4M3FN";
    case c10::ScalarType::Float8_e8m0fnu: return "DT_FLOAT8_E8M0";
    case c10::ScalarType::Float4_e2m1fn_x2: return "DT_FLOAT4_E2M1";
    case c10::ScalarType::Bits4x2: return "DT_FLOAT4_E1M2";
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

void raise(Status status, std::initializer_list<Printable> parts, bool own) {
  throw Error(status, joined(parts), own);
}

Error error_of(const std::exception& e) {
  if (const auto* own = dynamic_cast<const Error*>(&e)) return *own;
  const std::string what = e.what();
  return {kOpFailed, what.substr(0, what.find("\nException raised from"))};
}

Error classified(const Error& error, const char* otherwise) {
  constexpr Status states[] = {
      kOutOfMemory, kReportTimeout, kStreamSyncTimeout, kEventSyncTimeout, kMemoryError, kEccError};
  if (error.classed || std::count(std::begin(states), std::end(states), error.status))
    return {error.status, error.what(), true};
  return {error.status, text(error.what(), " (", otherwise, ")"), true};
}

int guarded(const char* name, c10::function_ref<void()> body) noexcept {
  try {
    check(!process.forked(), kContextNull,
        "this process was forked from one that uses NPUs, and cannot use them; start it with the "
        "method spawn");
    body();
    return kOk;
  } catch (const std::exception& e) {
    auto error = error_of(e);
    // At a call, the device's status of failed operators is of something that failed before.
    const bool cann = std::strncmp(name, "ascend_emulator", 15) != 0;
    if (cann && error.status != kOpFailed) error = classified(error, kRefused);
    return fail(error.status, text(name, ": ", error.what()));
  }
}

}  // namespace emu
