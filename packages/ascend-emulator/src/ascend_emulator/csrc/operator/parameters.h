// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The parameters of an operator's body without their types: the values of a call lie one behind the
// other, and tables say what is done with each. A template for each list of parameters would take a
// fifth of the time that the emulator compiles.
#pragma once
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <tuple>
#include <utility>

#include "arguments.h"

namespace emu {

// A parameter that is a struct stands for several arguments, its fields in this order:
//   struct Ends { Opt<Ints> query_ends, kv_ends; FIELDS(query_ends, kv_ends) };
#define FIELDS(...)                                  \
  static constexpr const char* names = #__VA_ARGS__; \
  auto fields() { return std::tie(__VA_ARGS__); }
template <class T>
concept HasFields = requires(T& value) { value.fields(); };
template <class T> constexpr const char* names_of() {
  if constexpr (HasFields<T>) return T::names;
  return nullptr;
}
template <class T> auto fields_of(T& value) {
  if constexpr (HasFields<T>) return value.fields();
  else return std::tie(value);
}
template <class... T> struct Types {};
template <class... T> Types<T...> types_of(std::tuple<T&...>);
// Types of the arguments of an operator with these parameters.
template <class... Params> auto flat() {
  if constexpr ((HasFields<Params> || ...))
    return decltype(types_of(std::tuple_cat(fields_of(std::declval<Params&>())...))){};
  else return Types<Params...>{};
}
// The list of parameters as in the source, with the fields of the structs among them.
const char* with_fields(const char* parameters, std::initializer_list<const char*> fields);
template <class... Params> constexpr const char* parameters_of(const char* parameters) {
  if constexpr ((HasFields<Params> || ...)) return with_fields(parameters, {names_of<Params>()...});
  else return parameters;
}

// An argument with stand-ins instead of its tensors.
template <class T> [[gnu::noinline]] T stood_in(StandIns& stand_ins, const T& value) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return stand_ins.of(value);
  } else if constexpr (std::is_same_v<T, Weight>) {
    return {stand_ins.of(value), {}};
  } else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, Ints>) {
    return stand_ins.of(value);
  } else if constexpr (std::is_same_v<T, Opt<Tensor>> || std::is_same_v<T, Opt<Ints>>) {
    return value ? T(stand_ins.of(*value)) : value;
  } else if constexpr (std::is_same_v<T, Tensors> || std::is_same_v<T, Weights>) {
    T out;
    for (const auto& each : value) out.push_back(stand_ins.of(each));
    return out;
  } else if constexpr (std::is_same_v<T, Result>) {
    if (!value.tensor) return value;
    const Result result{stand_ins.result()};
    result.tensor->value = stand_ins.of(value.tensor->value);
    return result;
  } else if constexpr (HasFields<T>) {
    T out = value;
    std::apply([&](auto&... each) { ((each = stood_in(stand_ins, each)), ...); }, out.fields());
    return out;
  } else {
    return value;
  }
}

// A C argument.
class Raw {
 public:
  template <class C> explicit Raw(C value) {
    static_assert(sizeof value <= sizeof bits_);
    std::memcpy(&bits_, &value, sizeof value);
  }
  template <class C> C as() const {
    C value;
    std::memcpy(&value, &bits_, sizeof value);
    return value;
  }

 private:
  uint64_t bits_ = 0;
};

// What is done with a parameter of one type, whose value lies at an address.
struct ParameterType {
  void (*take)(ArgumentReader& reader, const Raw*& next, void* at);
  void (*stand_in)(StandIns& stand_ins, const void* value, void* at);
  void (*destroy)(void* value);
};
template <class T> void take_parameter(ArgumentReader& reader, const Raw*& next, void* at) {
  const auto take_next = [&]<class Field>(Field*) {
    return reader.take<Field>((next++)->template as<typename Arg<Field>::C>());
  };
  if constexpr (HasFields<T>) {
    T taken;
    std::apply([&](auto&... each) { ((each = take_next(&each)), ...); }, taken.fields());
    new (at) T(std::move(taken));
  } else {
    new (at) T(take_next(static_cast<T*>(nullptr)));
  }
}
template <class T> void destroy_value(void* value) { static_cast<T*>(value)->~T(); }
template <class T> inline constexpr ParameterType kParameterType{&take_parameter<T>,
    [](StandIns& stand_ins, const void* value, void* at) {
      new (at) T(stood_in(stand_ins, *static_cast<const T*>(value)));
    },
    &destroy_value<T>};

// Where the values of parameters lie.
template <class... Params> constexpr std::array<size_t, sizeof...(Params) + 1> offsets() {
  constexpr size_t sizes[] = {sizeof(Params)..., 0};
  std::array<size_t, sizeof...(Params) + 1> out{};
  for (size_t i = 0; i < sizeof...(Params); ++i)
    out[i + 1] =
        (out[i] + sizes[i] + alignof(std::max_align_t) - 1) & ~(alignof(std::max_align_t) - 1);
  return out;
}
template <class... Params> inline constexpr auto kOffsets = offsets<Params...>();
template <class R, class... Params, size_t... I> void call_with(
    std::index_sequence<I...>, R (*body)(Params...), const std::byte* values, Computation* out) {
  static_assert(((alignof(Params) <= alignof(std::max_align_t)) && ...));
  constexpr auto& at = kOffsets<Params...>;
  if constexpr (std::is_void_v<R>)
    body(*std::launder(reinterpret_cast<const Params*>(values + at[I]))...);
  else *out = body(*std::launder(reinterpret_cast<const Params*>(values + at[I]))...);
}

// The parameters of a body. Type: ParameterType, or that of another reader.
template <class Type> struct ParameterList {
  size_t count;
  const Type* const* types;
  const size_t* offsets;  // the last one: the size of all
  void (*call)(void (*body)(), const std::byte* values, Computation* out);
};
template <class R, class... Params>
void call_erased(void (*body)(), const std::byte* values, Computation* out) {
  call_with(
      std::index_sequence_for<Params...>{}, reinterpret_cast<R (*)(Params...)>(body), values, out);
}
template <class... Params>
inline constexpr const ParameterType* kTypes[] = {&kParameterType<Params>..., nullptr};
template <class R, class... Params> inline constexpr ParameterList<ParameterType> kParameters{
    sizeof...(Params), kTypes<Params...>, kOffsets<Params...>.data(), &call_erased<R, Params...>};

// The values of a call.
template <class Type> class ParameterValues {
 public:
  explicit ParameterValues(const ParameterList<Type>& list)
      : list_(&list), memory_(new std::byte[list.offsets[list.count]]) {}
  ParameterValues(ParameterValues&& other) noexcept
      : list_(other.list_),
        memory_(std::move(other.memory_)),
        made_(std::exchange(other.made_, 0)) {}
  ~ParameterValues() {
    while (made_) --made_, list_->types[made_]->destroy(at(made_));
  }
  // make(type, address, index) makes the value of each parameter.
  template <class Make> void make(Make make) {
    for (; made_ < list_->count; ++made_) make(*list_->types[made_], at(made_), made_);
  }
  const void* operator[](size_t index) const { return at(index); }
  // body: R (*)(Params...)
  Computation call(void (*body)()) const {
    Computation out;
    list_->call(body, memory_.get(), &out);
    return out;
  }

 private:
  void* at(size_t index) const { return memory_.get() + list_->offsets[index]; }

  const ParameterList<Type>* list_;
  std::unique_ptr<std::byte[]> memory_;
  size_t made_ = 0;
};

}  // namespace emu
