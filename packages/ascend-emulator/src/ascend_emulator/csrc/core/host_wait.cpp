// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "host_wait.h"

#include <dlfcn.h>

#include <atomic>

#include "process.h"

namespace emu {
namespace {
// Python's functions, by their names.
struct Interpreter {
  std::atomic<bool> releases{false};
  int (*initialized)();
  int (*lock_held)();
  void* (*save)();
  void (*restore)(void*);
};
Interpreter& python() { return process.part<Interpreter>(); }
}  // namespace

void HostWait::release_python() {
  const auto find = [](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  };
  python().releases = find(python().initialized, "Py_IsInitialized") &&
                      find(python().lock_held, "PyGILState_Check") &&
                      find(python().save, "PyEval_SaveThread") &&
                      find(python().restore, "PyEval_RestoreThread");
}

HostWait::HostWait() {
  if (python().releases && python().initialized() && python().lock_held()) state_ = python().save();
}

HostWait::~HostWait() {
  if (state_) python().restore(state_);
}

}  // namespace emu
