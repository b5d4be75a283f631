// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Collectives on kernel addresses, to be called within Communicator::perform(). Counts are numbers
// of elements.
#pragma once
#include "communicator.h"

namespace emu::hccl {

using Counts = std::vector<uint64_t>;  // by rank

void barrier(Communicator& on, const Header& call);
void all_reduce(Communicator& on, const Header& call, void* send, void* receive);
void reduce(Communicator& on, const Header& call, void* send, void* receive);
void reduce_scatter(Communicator& on, const Header& call, void* send, const Counts& counts,
    const Counts& starts, void* receive);
void all_gather(Communicator& on, const Header& call, void* send, void* receive,
    const Counts& counts, const Counts& starts);
void broadcast(Communicator& on, const Header& call, void* buffer);
void scatter(Communicator& on, const Header& call, void* send, void* receive);
void all_to_all(Communicator& on, const Header& call, void* send, const Counts& send_counts,
    const Counts& send_starts, void* receive, const Counts& receive_counts,
    const Counts& receive_starts);

}  // namespace emu::hccl
