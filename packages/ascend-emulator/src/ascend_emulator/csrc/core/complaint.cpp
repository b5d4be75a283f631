// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "complaint.h"

#include <algorithm>
#include <vector>

#include "fault.h"
#include "names.h"
#include "registry.h"
#include "rules.h"
#include "status.h"

namespace emu {
namespace {

// ATB's operators are disabled by name where the layout of their parameters is not known
// (cann_names.atb_without_layout()): they may be of a later torch_npu.
bool may_be_of_atb(const std::string& name) {
  return name.starts_with("atb::") || name.starts_with("Atb");
}

std::string problem() {
  for (const auto& name : split("ASCEND_EMULATOR_WITHOUT", ','))
    if (!names::callable(name) && !may_be_of_atb(name))
      return text("no entry point of CANN is called '", name, "' (ASCEND_EMULATOR_WITHOUT)",
          names::hint(name), "; `ascend-emulator coverage` lists them");
  std::vector<std::string> ids;
  for (const auto* each = rules; each->id; ++each) ids.emplace_back(each->id);
  for (const auto& id : split("ASCEND_EMULATOR_ALLOW", ','))
    if (std::find(ids.begin(), ids.end(), id) == ids.end())
      return text("there is no rule '", id, "' (ASCEND_EMULATOR_ALLOW)", names::hint_of(id, ids),
          "; `ascend-emulator rules` lists them");
  return fault::read_environment();
}

}  // namespace

const std::string& complaint() {
  static const auto* const found = new std::string(problem());
  return *found;
}

}  // namespace emu

// For `ascend-emulator run` and activate(): the problem with the variables, empty if there is none.
EXPORT const char* ascend_emulator_complaint() { return emu::complaint().c_str(); }
