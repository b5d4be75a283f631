// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Facts of operators as data. facts.py generates the table from the TOML files in facts/, into the
// file of stubs.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace emu {

// Set of dtypes, one bit each.
using DTypeSet = uint64_t;
// How the workspace is estimated (facts.cpp).
enum class Workspace : uint8_t { none, cube, attention_backward, sort };
// How FLOPs are counted (op.cpp): one per element of the result, or those of the matmul of the
// first two tensors, of the two after an addend, or of a matrix for each group of rows.
enum class Cost : uint8_t { elements, matmul, matmul_and_addend, grouped_matmul };

struct OperatorFacts {
  const char* name;
  // Of an operator's first tensor, by torch_npu's documentation and by what NPUs took; empty if
  // there is no rule.
  DTypeSet dtypes = 0;
  Workspace workspace = Workspace::none;
  Cost cost = Cost::elements;
  bool communicates = false;  // with other ranks: its tasks may block, as collectives do
};

extern const OperatorFacts operator_facts[];  // by name
extern const size_t operators_with_facts;

const OperatorFacts& facts_of(const char* name);

// Bytes of a call's workspace: at most what an NPU needs, 0 if that is unknown. Nothing is stored
// in it here; it counts against the device's memory.
uint64_t workspace_bytes(const OperatorFacts& facts, const std::vector<at::Tensor>& tensors);
// Bytes of a workspace for attention to this number of keys, beside those; and the most keys for
// which a workspace has these bytes.
uint64_t workspace_of_keys(int64_t keys);
int64_t keys_of_workspace(uint64_t bytes);

}  // namespace emu
