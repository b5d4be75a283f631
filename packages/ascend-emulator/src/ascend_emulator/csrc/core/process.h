// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The owner of this process's mutable state. Each file declares its state as one struct and gets it
// by process.part<Struct>(); no file of core, runtime and hccl has mutable globals of its own.
#pragma once
#include <atomic>

namespace emu {

class Process {
 public:
  // Created at first use and never destroyed: torch_npu makes calls and frees memory during exit.
  template <class Part> Part& part() {
    static Part* const instance = new Part;
    return *instance;
  }

  // The life cycle. runtime/process.cpp has the order in which the parts end.
  void reset(int npu);  // ends the NPU's captures and streams, then frees its memory
  void exit();          // stops all worker threads
  // A child of a process that had used an NPU: all calls fail. The worker threads do not exist
  // there, and a context of CANN does not survive a fork either (torch_npu/npu/__init__.py, "Cannot
  // re-initialize NPU in forked subprocess").
  void fork() { forked_ = true; }
  bool forked() const { return forked_; }

 private:
  std::atomic<bool> forked_{false};
};

inline constinit Process process;

}  // namespace emu
