// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Workspace: device memory that the caller of an operator allocates for it, of the size that
// GetWorkspaceSize answers. Nothing is stored in it here; it counts against the device's memory.
#pragma once
#include <ATen/ATen.h>

#include <atomic>

namespace emu {

struct Workspace;  // how an operator's size is estimated

// Bytes for a call with these tensors: at most what an NPU needs, 0 if that is unknown. `found`
// keeps the operator's entry.
uint64_t workspace_bytes(
    std::atomic<const Workspace*>& found, const char* name, const std::vector<at::Tensor>& tensors);

}  // namespace emu
