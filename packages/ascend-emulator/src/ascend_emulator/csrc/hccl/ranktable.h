// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The file that describes a cluster (Huawei's "Rank table"): which server has which ranks.
#pragma once
#include <string>
#include <vector>

#include "transport.h"

namespace emu::hccl {

struct RankTable {
  std::vector<std::string> servers;  // the address of each rank's
  std::string identity;              // the same for the same file
  Secret secret;                     // of those who can read the file
};
RankTable read_rank_table(const char* path);

}  // namespace emu::hccl
