// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Registry of the implemented entry points, with their effects. Names that torch_npu can look up
// and that are not registered get a generated stub that fails with the name (build.py).
#ifndef ASCEND_EMULATOR_CORE_REGISTRY_H
#define ASCEND_EMULATOR_CORE_REGISTRY_H
#include <string_view>
#include <type_traits>

#include "fault.h"
#include "status.h"

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

// Whether this entry point is implemented.
bool registered(const char* name);

// Name of the nth parameter of a list as in the source: "bias" is number 1 of "(Tensor self,
// Opt<Tensor> bias, Tensor out)".
std::string nth(const char* list, int64_t n);

// Runs the body of an entry point, unless it is disabled or a fault is due.
int intercepted(const char* name, c10::function_ref<void()> body) noexcept;

// Parameter of an entry point: a pointer that may be null.
template <class T>
struct Nullable {
  T* pointer;
  operator T*() const { return pointer; }
};

// Throws kInvalidParam, as CANN answers, if the parameter at `position` of the list is a null
// pointer to a non-const object: an output. Pointers to void are handles and addresses, which
// bodies check.
template <class T>
void check_output(const T& value, const char* parameters, int position) {
  if constexpr (std::is_pointer_v<T>) {
    using Object = std::remove_pointer_t<T>;
    if constexpr (!std::is_const_v<Object> && !std::is_void_v<Object> &&
                  !std::is_function_v<Object>)
      check(value != nullptr, kInvalidParam, nth(parameters, position), " is null");
  }
}

// The exported function of an entry point: as its body, returning a status.
template <auto Body, class Name>
struct EntryPoint;
template <class... Params, void (*Body)(Params...), class Name>
struct EntryPoint<Body, Name> {
  static int call(Params... args) {
    return intercepted(Name::text, [&] {
      int position = 0;
      (check_output(args, Name::parameters, position++), ...);
      Body(args...);
      note(Name::text);
    });
  }
};
template <void (*Body)(...), class Name>
struct EntryPoint<Body, Name> {
  static int call(...) {
    return intercepted(Name::text, [] {
      Body();
      note(Name::text);
    });
  }
};

}  // namespace emu

#define REGISTER(EFFECT, NAME, BODY)                                      \
  static_assert(std::string_view(BODY) != "{}" || *(emu::EFFECT).why,     \
      #NAME " does nothing: say why that is right, with nothing(\"…\")"); \
  static const emu::Registration registration_##NAME{#NAME, emu::EFFECT, __FILE__};

// A C entry point `int NAME(PARAMS)`. The body may throw emu::Error; it returns nothing. A null
// pointer to a non-const object is refused, unless the parameter is Nullable.
#define ACL_API(EFFECT, NAME, PARAMS, ...)                                             \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)                                                 \
  static void body_##NAME PARAMS __VA_ARGS__ struct name_##NAME {                      \
    static constexpr const char *text = #NAME, *parameters = #PARAMS;                  \
  };                                                                                   \
  extern "C" {                                                                         \
  static void* resolve_##NAME() {                                                      \
    return reinterpret_cast<void*>(&emu::EntryPoint<&body_##NAME, name_##NAME>::call); \
  }                                                                                    \
  __attribute__((visibility("default"), ifunc("resolve_" #NAME))) void NAME();         \
  }
// A C entry point `TYPE NAME(PARAMS)` that returns a value. The body cannot fail.
#define ACL_VALUE(TYPE, EFFECT, NAME, PARAMS, ...) \
  REGISTER(EFFECT, NAME, #__VA_ARGS__)             \
  EXPORT TYPE NAME PARAMS {                        \
    emu::note(#NAME);                              \
    return [&]()->TYPE __VA_ARGS__();              \
  }

#endif  // ASCEND_EMULATOR_CORE_REGISTRY_H
