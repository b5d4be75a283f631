// Every entry point that the emulator has, with its effect. What torch_npu can ask for and is not registered here gets a
// generated stub that refuses by its own name (see build.py).
#ifndef ASCEND_EMULATOR_CORE_REGISTRY_H
#define ASCEND_EMULATOR_CORE_REGISTRY_H
#include <string_view>

#include "fault.h"
#include "status.h"

namespace emu {

// What a call that succeeds has done: computed on a device, told something through its outputs, kept or released something of the
// host's, or nothing, and why nothing is right. The last three are what the documentation calls bookkeeping.
struct Effect {
  const char* name;
  const char* why = "";
};
constexpr Effect computed{"computed"}, answers{"answers"}, keeps{"keeps"};
constexpr Effect nothing(const char* why) { return {"nothing", why}; }

struct Registration {
  Registration(const char* name, Effect effect, const char* file);
};

// ASCEND_EMULATOR_CALLS=FILE: the name of each operator or call that was carried out is added to the file, once a process.
void note(const char* name);

// True when the user asked for this entry point to be taken out (ASCEND_EMULATOR_WITHOUT=name,name…).
bool removed(const char* name);

// Whether this is an entry point, and not one that refuses.
bool registered(const char* name);

// Runs the body of an entry point, unless it was taken out or is to fail.
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
// One `TYPE NAME(PARAMS)` whose result is no status. The body cannot fail.
#define ACL_VALUE(TYPE, EFFECT, NAME, PARAMS, ...) \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)             \
  EXPORT TYPE NAME PARAMS {                        \
    emu::note(#NAME);                              \
    return [&]()->TYPE __VA_ARGS__();              \
  }

#endif  // ASCEND_EMULATOR_CORE_REGISTRY_H
