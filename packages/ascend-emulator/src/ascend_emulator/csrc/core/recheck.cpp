// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "recheck.h"

namespace emu {

void Recheck::check(
    c10::function_ref<std::string()> what, const void* address, uint64_t bytes) const {
  const auto found = look_up(address, bytes);
  const bool gone = found.bytes < bytes;
  if (!gone && found.allocation <= allocated_) return;
  raise(kInvalidParam, {what(), ", ", bytes, " bytes at ", address, ", which were ",
                           gone && is_virtual(address) ? "unmapped" : "freed", " after the call",
                           gone ? "" : ", and allocated again"});
}

void Recheck::check(const char* what, const void* address, uint64_t bytes) const {
  check([&] { return std::string(what); }, address, bytes);
}

}  // namespace emu
