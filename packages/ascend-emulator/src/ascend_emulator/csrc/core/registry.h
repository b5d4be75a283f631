// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Registry of the implemented entry points, with their effects. Names that torch_npu can look up
// and that are not registered get a generated stub that fails with the name (cann_names.py).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace emu {

// Effect of a successful call: computed on a device, answered through its outputs, kept or released
// host state, or nothing, with the reason why nothing is correct. The last three are "bookkeeping"
// in the documentation.
struct Effect {
  const char* name;
  const char* why = "";
};
constexpr Effect computed{"computed"}, answers{"answers"}, keeps{"keeps"};
constexpr Effect nothing(const char* why) { return {"nothing", why}; }

struct Registration {
  Registration(const char* name, Effect effect, const char* file);
};

// ASCEND_EMULATOR_CALLS=FILE: appends the name of each operator or call that was executed, once per
// process.
void note(const char* name);

// Whether the user disabled this entry point (ASCEND_EMULATOR_WITHOUT=name,name…).
bool removed(const char* name);

// Whether this entry point is implemented; the names of all.
bool registered(const char* name);
std::vector<std::string> registered_names();

// The parts of a variable's value.
std::vector<std::string> split(const char* variable, char separator);

// Name of the nth parameter of a list as in the source: "bias" is number 1 of "(Tensor self,
// Opt<Tensor> bias, Tensor out)".
std::string nth(const char* list, int64_t n);

}  // namespace emu
