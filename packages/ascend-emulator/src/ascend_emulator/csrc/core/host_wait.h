// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Scope around a host synchronization: releases Python's interpreter lock if this thread holds it,
// once
// operators in Python are in use, which run on the streams' threads. torch_npu keeps the lock in
// some calls that wait, such as torch.npu.empty_cache().
#pragma once

namespace emu {

class HostWait {
 public:
  HostWait();
  ~HostWait();
  HostWait(const HostWait&) = delete;
  static void release_python();  // from now on

 private:
  void* state_ = nullptr;
};

}  // namespace emu
