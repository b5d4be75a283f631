// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Sizes of workspaces are estimates from below, since CANN publishes none:
// - Operators on the cube cores need the system workspace of Ascend C's matrix API (CANN's
//   documentation, "Workspace": "must be set on Atlas A2"). It is 16 MiB there, as the operators of
//   vllm-ascend and sgl-kernel-npu reserve it (SYSTEM_NEED_WORKSPACE); for 310P it is unknown.
// - Flash attention's backward adds the gradients of query, key and value in float32 and converts
//   them at the end.
// - Sort writes 8 bytes (value and index) per element and merges from one buffer into another
//   (CANN's documentation of Ascend C's Sort and MrgSort): rows that do not fit into the 192 KiB of
//   a vector core's unified buffer are merged in the workspace, one row per core.
#include "facts.h"

#include <algorithm>
#include <cstring>

#include "core/device.h"

namespace emu {

namespace {

uint64_t system_bytes() { return is_chip("Ascend310P") ? 0 : 16u << 20; }

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

}  // namespace

const OperatorFacts& facts_of(const char* name) {
  static const OperatorFacts none{""};
  const auto* const end = operator_facts + operators_with_facts;
  const auto before = [](const OperatorFacts& each, const char* sought) {
    return std::strcmp(each.name, sought) < 0;
  };
  const auto* const found = std::lower_bound(operator_facts, end, name, before);
  return found == end || std::strcmp(found->name, name) ? none : *found;
}

// That attention needs more workspace for longer sequences is reported (vllm-ascend, pull request
// 15486), and how much more is not published.
namespace {
constexpr int64_t kKeys = 128;
constexpr uint64_t kBytesOfKeys = 512;
}  // namespace
uint64_t workspace_of_keys(int64_t keys) {
  return static_cast<uint64_t>((keys + kKeys - 1) / kKeys) * kBytesOfKeys;
}
int64_t keys_of_workspace(uint64_t bytes) {
  return static_cast<int64_t>(bytes / kBytesOfKeys) * kKeys;
}

uint64_t workspace_bytes(const OperatorFacts& facts, const std::vector<at::Tensor>& tensors) {
  switch (facts.workspace) {
    case Workspace::none: return 0;
    case Workspace::cube: return system_bytes();
    case Workspace::attention_backward: return attention_backward(tensors);
    case Workspace::sort: return sort(tensors);
  }
  return 0;
}

}  // namespace emu
