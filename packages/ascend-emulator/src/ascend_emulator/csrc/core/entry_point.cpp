// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "entry_point.h"

#include "fault.h"
#include "refusal.h"

namespace emu {

int intercepted(const char* name, c10::function_ref<void()> body) noexcept {
  if (removed(name)) return refuse(name);
  return guarded(name, [&] {
    if (fault::armed()) [[unlikely]]
      fault::at(name);
    body();
  });
}

}  // namespace emu
