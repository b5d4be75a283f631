// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "host_wait.h"

#include <dlfcn.h>

#include <atomic>

namespace emu {
namespace {
std::atomic<bool> releases{false};
int (*python_initialized)();
int (*python_lock_held)();
void* (*python_save)();
void (*python_restore)(void*);
}  // namespace

void HostWait::release_python() {
  const auto find = [](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  };
  releases = find(python_initialized, "Py_IsInitialized") &&
             find(python_lock_held, "PyGILState_Check") && find(python_save, "PyEval_SaveThread") &&
             find(python_restore, "PyEval_RestoreThread");
}

HostWait::HostWait() {
  if (releases && python_initialized() && python_lock_held()) state_ = python_save();
}

HostWait::~HostWait() {
  if (state_) python_restore(state_);
}

}  // namespace emu
