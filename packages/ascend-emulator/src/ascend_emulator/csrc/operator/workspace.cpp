// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Sizes are estimates from below, since CANN publishes none:
// - Operators on the cube cores need the system workspace of Ascend C's matrix API (CANN's
// documentation, "Workspace": "must be
//   set on Atlas A2"). It is 16 MiB there, as the operators of vllm-ascend and sgl-kernel-npu
//   reserve it (SYSTEM_NEED_WORKSPACE); for 310P the size is unknown.
// - Flash attention's backward adds the gradients of query, key and value in float32 and converts
// them at the end.
// - Sort writes 8 bytes (value and index) per element and merges from one buffer into another
// (CANN's documentation of Ascend C's
//   Sort and MrgSort): rows that do not fit into the 192 KiB of a vector core's unified buffer are
//   merged in the workspace, one row per core.
#include "workspace.h"

#include <algorithm>
#include <cstring>

#include "core/device.h"

namespace emu {

struct Workspace {
  const char* part;  // of the operator's name
  uint64_t (*bytes)(const std::vector<at::Tensor>& tensors);
};

namespace {

uint64_t system_bytes() { return is_chip("Ascend310P") ? 0 : 16u << 20; }

uint64_t cube(const std::vector<at::Tensor>&) { return system_bytes(); }

uint64_t attention_backward(const std::vector<at::Tensor>& tensors) {
  uint64_t gradients = 0;
  for (size_t i = 0; i < std::min<size_t>(tensors.size(), 3); ++i)  // query, key, value
    if (tensors[i].defined() && tensors[i].scalar_type() != at::kFloat)
      gradients += tensors[i].numel() * sizeof(float);
  return system_bytes() + gradients;
}

uint64_t sort(const std::vector<at::Tensor>& tensors) {
  constexpr uint64_t per_element = 2 * 8, unified_buffer = 192u << 10;
  if (tensors.empty() || !tensors[0].defined() || tensors[0].numel() == 0 || tensors[0].dim() == 0)
    return 0;
  const uint64_t row = tensors[0].size(-1), rows = tensors[0].numel() / row;
  return row * per_element > unified_buffer
             ? std::min<uint64_t>(rows, chip().vector_cores) * row * per_element
             : 0;
}

// The first entry whose text is in the name.
const Workspace kWorkspaces[] = {{"AttentionScoreGrad", attention_backward},
    {"AttentionUnpaddingScoreGrad", attention_backward},
    {"AttentionUpdate", [](const std::vector<at::Tensor>&) -> uint64_t { return 0; }},
    {"Attention", cube}, {"RingMLA", cube}, {"MlaProlog", cube}, {"LightningIndexer", cube},
    {"Matmul", cube}, {"MatMul", cube}, {"aclnnMm", cube}, {"aclnnMv", cube}, {"ddmm", cube},
    {"Addmv", cube}, {"Addbmm", cube}, {"Baddbmm", cube},
    {"Linear1d", [](const std::vector<at::Tensor>&) -> uint64_t { return 0; }},
    {"atb::Linear", cube}, {"aclnnConv", cube}, {"MoeDistribute", cube}, {"aclnnSort", sort},
    {"ApplyTopKTopP", sort}, {"TopKTopPSample", sort},
    {"", [](const std::vector<at::Tensor>&) -> uint64_t { return 0; }}};

}  // namespace

uint64_t workspace_bytes(std::atomic<const Workspace*>& found, const char* name,
    const std::vector<at::Tensor>& tensors) {
  const Workspace* entry = found;
  if (!entry)
    found = entry = std::find_if(std::begin(kWorkspaces), std::end(kWorkspaces),
        [&](const auto& each) { return std::strstr(name, each.part); });
  return entry->bytes(tensors);
}

}  // namespace emu
