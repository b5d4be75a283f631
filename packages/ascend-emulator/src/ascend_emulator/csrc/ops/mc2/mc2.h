// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of MC2 operators (fused computation and communication). Each is one call on a
// communicator, like a collective: failures are sent to the other ranks, and mismatched calls are
// reported.
#pragma once
#include <initializer_list>

#include "operator/op.h"
#include "hccl/collectives.h"

namespace emu::hccl {

// The communicator of this name (hccl/api.h), for an operator's call: it must not have failed.
std::shared_ptr<Communicator> group(const char* argument, const std::string& name);
void check_ranks(const char* argument, int64_t given, const Communicator& on);

// Header of a call with `count` elements, equal on all ranks.
Header fused_header(CallKind kind, at::ScalarType type, int64_t count);

// Runs the body as one call. An exception fails the communicator.
void fused(Communicator& on, const Header& call, const std::function<void()>& body);

// Within fused(): throws at the first value that differs between ranks.
struct RankValue {
  const char* name;
  int64_t value;
};
void check_same_on_all_ranks(
    Communicator& on, const Header& call, const std::vector<RankValue>& values);

// Within fused(): sends each rank its contiguous tensor and receives into contiguous tensors,
// including this rank's own.
void exchange(Communicator& on, const Header& call, const std::vector<at::Tensor>& out,
    const std::vector<at::Tensor>& in);
// All ranks' tensors, stacked in a new first dimension; all have this rank's shape.
at::Tensor gathered(Communicator& on, const Header& call, const at::Tensor& own);

}  // namespace emu::hccl
