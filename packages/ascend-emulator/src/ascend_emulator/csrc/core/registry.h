// Registry of the implemented entry points, with their effects. Names that torch_npu can look up and that are not registered get
// a generated stub that fails with the name (build.py).
#ifndef ASCEND_EMULATOR_CORE_REGISTRY_H
#define ASCEND_EMULATOR_CORE_REGISTRY_H
#include <string_view>

#include "fault.h"
#include "status.h"

namespace emu {

// Effect of a successful call: computed on a device, answered through its outputs, kept or released host state, or nothing, with
// the reason why nothing is correct. The last three are "bookkeeping" in the documentation.
struct Effect {
  const char* name;
  const char* why = "";
};
constexpr Effect computed{"computed"}, answers{"answers"}, keeps{"keeps"};
constexpr Effect nothing(const char* why) { return {"nothing", why}; }

struct Registration {
  Registration(const char* name, Effect effect, const char* file);
};

// ASCEND_EMULATOR_CALLS=FILE: appends the name of each operator or call that was executed, once per process.
void note(const char* name);

// Whether the user disabled this entry point (ASCEND_EMULATOR_WITHOUT=name,name…).
bool removed(const char* name);

// Whether this entry point is implemented.
bool registered(const char* name);

// Runs the body of an entry point, unless it is disabled or a fault is due.
int intercepted(const char* name, c10::function_ref<void()> body) noexcept;

}  // namespace emu

#define REGISTER(EFFECT, NAME, BODY)                                                                                            \
  static_assert(                                                                                                                \
      std::string_view(BODY) != "{}" || *(emu::EFFECT).why, #NAME " does nothing: say why that is right, with nothing(\"…\")"); \
  static const emu::Registration registration_##NAME{#NAME, emu::EFFECT, __FILE__};

// A C entry point `int NAME(PARAMS)`. The body may throw emu::Error; it returns nothing.
#define ACL_API(EFFECT, NAME, PARAMS, ...) \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)     \
  EXPORT int NAME PARAMS {                 \
    return emu::intercepted(#NAME, [&] {   \
      [&] __VA_ARGS__();                   \
      emu::note(#NAME);                    \
    });                                    \
  }
// A C entry point `TYPE NAME(PARAMS)` that returns a value. The body cannot fail.
#define ACL_VALUE(TYPE, EFFECT, NAME, PARAMS, ...) \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)             \
  EXPORT TYPE NAME PARAMS {                        \
    emu::note(#NAME);                              \
    return [&]()->TYPE __VA_ARGS__();              \
  }

#endif  // ASCEND_EMULATOR_CORE_REGISTRY_H
