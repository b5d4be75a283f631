// Every entry point that the emulator has, with one of two states. What torch_npu can ask for and is not
// registered here gets a generated stub that refuses by its own name (see build.py): there is no fourth state.
#ifndef ASCEND_EMULATOR_CORE_REGISTRY_H
#define ASCEND_EMULATOR_CORE_REGISTRY_H
#include "fault.h"
#include "status.h"

namespace emu {

enum class State { computed, bookkeeping };

struct Registration {
  Registration(const char* name, State state, const char* file);
};

// True when the user asked for this entry point to be taken out (ASCEND_EMULATOR_WITHOUT=name,name…).
bool removed(const char* name);

// Whether this is an entry point, and not one that refuses.
bool registered(const char* name);

// Runs the body of an entry point, unless it was taken out or is to fail.
template <class Body>
int intercepted(const char* name, Body&& body) noexcept {
  if (removed(name)) return refuse(name);
  return guarded(name, [&] {
    if (fault::armed()) [[unlikely]] fault::at(name);
    body();
  });
}

}  // namespace emu

// A C entry point `int NAME(PARAMS)`. The body may throw emu::Error; it returns nothing.
#define ACL_API(STATE, NAME, PARAMS, ...)                                             \
  static const emu::Registration registration_##NAME{#NAME, emu::State::STATE, __FILE__}; \
  EXPORT int NAME PARAMS {                                                              \
    return emu::intercepted(#NAME, [&] __VA_ARGS__);                                    \
  }

#endif  // ASCEND_EMULATOR_CORE_REGISTRY_H
