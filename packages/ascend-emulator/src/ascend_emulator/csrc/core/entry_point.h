// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Macros that define the C entry points of CANN.
#pragma once
#include <string_view>
#include <type_traits>

#include "registry.h"
#include "status.h"

namespace emu {

// Runs the body of an entry point, unless it is disabled or a fault is due. `shown`: its name in
// messages, where that is another.
int intercepted(
    const char* name, c10::function_ref<void()> body, const char* shown = nullptr) noexcept;

// Parameter of an entry point: a pointer that may be null.
template <class T> struct Nullable {
  T* pointer;
  operator T*() const { return pointer; }
};

// Throws kInvalidParam, as CANN answers, if the parameter at `position` of the list is a null
// pointer to a non-const object: an output. Pointers to void are handles and addresses, which
// bodies check.
template <class T> void check_output(const T& value, const char* parameters, int position) {
  if constexpr (std::is_pointer_v<T>) {
    using Object = std::remove_pointer_t<T>;
    if constexpr (!std::is_const_v<Object> && !std::is_void_v<Object> &&
                  !std::is_function_v<Object>)
      check(value != nullptr, kInvalidParam, nth(parameters, position), " is null");
  }
}

// The exported function of an entry point: as its body, returning a status.
template <auto Body, class Name> struct EntryPoint;
template <class... Params, void (*Body)(Params...), class Name> struct EntryPoint<Body, Name> {
  static int call(Params... args) {
    return intercepted(Name::text, [&] {
      int position = 0;
      (check_output(args, Name::parameters, position++), ...);
      Body(args...);
      note(Name::text);
    });
  }
};
template <void (*Body)(...), class Name> struct EntryPoint<Body, Name> {
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
