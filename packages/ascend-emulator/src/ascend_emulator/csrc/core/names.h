// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Names that a user writes in variables: entry points of CANN, operators of the user's own, groups
// of calls, and rules. A name that nothing has would disable, break or allow nothing, without a
// word.
#pragma once
#include <string>
#include <vector>

namespace emu::names {

// Whether programs can call an entry point of this name, computed or not.
bool callable(const std::string& name);
// Whether the emulator computes it, or the user's own code does.
bool emulated(const std::string& name);

// "; did you mean X?", with the nearest of these names and the emulated ones; empty if none is
// near.
std::string hint(const std::string& name, const std::vector<std::string>& others = {});
// The same of `known` only.
std::string hint_of(const std::string& name, const std::vector<std::string>& known);

}  // namespace emu::names
