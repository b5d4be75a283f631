// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Macros that define an operator.
//
//   OP(aclnnSilu, (Tensor self, Tensor out), { at::silu_out(out, self); })
//
//   CHECKED(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), {
//     one_of("x", x, kFloating);        // runs in aclnnSwiGluGetWorkspaceSize, on the thread that
//     calls the operator COMPUTE { swiglu(x, dim, out); };  // runs on the stream
//   })
//
//   // The third argument has checks of shapes.h.
//   SHAPED(aclnnTriu, (Tensor self, int64_t diagonal, Tensor out), SAME(out, self), {
//   at::triu_out(out, self, diagonal); })
//
// The macros define both C functions that torch_npu looks up: `aclnnSiluGetWorkspaceSize(const
// aclTensor*, const aclTensor*, uint64_t*, aclOpExecutor**)`, which records the arguments, and
// `aclnnSilu(void*, uint64_t, aclOpExecutor*, aclrtStream)`, which submits it to the stream. The C
// parameter list follows from the C++ one (Arg below), so write the parameters in the order of the
// EXEC_NPU_CMD call sites in Ascend/op-plugin (BSD). torch_npu raises the error of a check at the
// call, the error of a computation when the stream is synchronized. The bodies of OP and SHAPED
// also run at the call, on stand-ins (dry_run.h), so they must neither block nor keep state;
// OP_OF_VALUES is OP without this. A version with fewer parameters calls body_NAME of one with all.
// Tensor values may be read in the computation only. A replayed graph runs the computation again,
// from unchanged captured arguments.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>

#include "checks.h"
#include "core/cost.h"
#include "core/recheck.h"
#include "core/entry_point.h"
#include "core/refusal.h"
#include "dry_run.h"
#include "facts.h"
#include "rule_table.h"
#include "signature.h"
#include "tensor.h"

namespace emu {

// What to do if the operator that this thread prepares fails on its stream: the other ranks must
// learn of it.
using OnFailure = std::function<void(const std::string& reason)>;
void on_failure(OnFailure failed);

// Callable that an operator executes on the stream. A computation may modify its captures and a
// replayed graph executes it again, so each execution calls a copy, unless the callable is const.
class Computation {
 public:
  Computation() = default;
  template <class Function,
      class = std::enable_if_t<!std::is_same_v<std::decay_t<Function>, Computation>>>
  Computation(Function function)
      : function_(new Function(std::move(function)),
            [](void* held) { delete static_cast<Function*>(held); }),
        run_([](void* held) {
          const auto& function = *static_cast<const Function*>(held);
          if constexpr (std::is_invocable_v<const Function&>) {
            function();
          } else {
            Function copy(function);
            copy();
          }
        }) {}
  void operator()() const { run_(function_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> function_{nullptr, [](void*) {}};
  void (*run_)(void*) = [](void*) {};
};

}  // namespace emu

struct aclOpExecutor {
  emu::Computation compute;
  std::vector<at::Tensor> tensors;        // in the order of the arguments, outputs last
  emu::Recheck memory{};                  // of these tensors
  const char* parameters = "";            // as in the source
  c10::SmallVector<uint16_t, 16> ends{};  // number of tensors up to and including each parameter
  bool reports_shape =
      false;           // the caller reads an output's shape as soon as the operator is launched
  bool hangs = false;  // injected fault
  bool communicates = false;             // facts.h
  std::vector<emu::Fractal> fractals{};  // unpacked before each execution
  emu::OnFailure failed{};               // of an operator that communicates
  void run() const {
    for (const auto& each : fractals) each.unpack();
    compute();
  }
};

namespace emu {

using at::Scalar;
using at::Tensor;
using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;
using Bools = std::vector<bool>;
using Tensors = std::vector<Tensor>;
using Scalars = std::vector<Scalar>;
using Text = std::string;
template <class T> using Opt = std::optional<T>;
struct DType {
  at::ScalarType value;
  operator at::ScalarType() const { return value; }
};
// Output with a data-dependent shape: assign() writes the values and reports the shape
// (aclGetViewShape).
struct Result {
  aclTensor* tensor;
  void assign(const Tensor& value) const;
};

// Arg<T>: the C type of a parameter, and its conversion to T.
template <class T> struct Arg {
  using C = T;
  static T get(C value) { return value; }
};
template <class T, class Object> struct Boxed {
  using C = const Object*;
  static T get(C object) {
    required(object);
    return object->value;
  }
};
template <> struct Arg<Tensor> : Boxed<Tensor, aclTensor> {};
template <> struct Arg<Scalar> : Boxed<Scalar, aclScalar> {};
template <> struct Arg<Ints> : Boxed<Ints, aclIntArray> {};
template <> struct Arg<Floats> : Boxed<Floats, aclFloatArray> {};
template <> struct Arg<Bools> : Boxed<Bools, aclBoolArray> {};
template <class T> struct Arg<Opt<T>> {
  using C = typename Arg<T>::C;
  static Opt<T> get(C object) { return given(object) ? Opt<T>(Arg<T>::get(object)) : std::nullopt; }
};
template <> struct Arg<Tensors> {
  using C = const aclTensorList*;
  static Tensors get(C list) {
    required(list);
    Tensors out;
    for (const auto* item : list->items)
      out.push_back(given(item) ? Arg<Tensor>::get(item) : Tensor());
    return out;
  }
};
template <> struct Arg<Weight> {
  using C = const aclTensor*;
  static Weight get(C object) {
    required(object);
    return {object->value, object->storage};
  }
};
template <> struct Arg<Weights> {
  using C = const aclTensorList*;
  static Weights get(C list) { return {Arg<Tensors>::get(list), {}}; }
};
template <> struct Arg<Stored> {
  using C = const aclTensor*;
  static Stored get(C object) {
    required(object);
    return {object->value, object->storage};
  }
};
template <class T> inline constexpr bool reads_fractal =
    std::is_same_v<T, Weight> || std::is_same_v<T, Weights> || std::is_same_v<T, Stored>;
template <> struct Arg<Scalars> {
  using C = const aclScalarList*;
  static Scalars get(C list) {
    required(list);
    Scalars out;
    for (const auto* item : list->items) out.push_back(item->value);
    return out;
  }
};
template <> struct Arg<Text> {
  using C = const char*;
  static Text get(C text) { return text ? text : ""; }
};
template <> struct Arg<DType> {
  using C = int32_t;
  static DType get(C code) { return {to_scalar_type(code)}; }
};
template <> struct Arg<Result> {
  using C = const aclTensor*;
  static Result get(C tensor) { return {const_cast<aclTensor*>(tensor)}; }
};

// Throws if the dtype of a tensor in [first, last) is not supported by the chip or not in
// `allowed`. `parameters` is the parameter list as in the source, `position` the parameter's index
// in it.
void check_dtypes(const std::vector<Tensor>& tensors, size_t first, size_t last, DTypeSet allowed,
    const char* parameters, int position);
// For computations (core/cost.h): the number of accessed bytes of an argument, or the accessed
// part.
namespace cost {
inline void partial_access(const Tensor& argument, double bytes) {
  partial_access(argument.const_data_ptr(), argument.nbytes(), bytes);
}
inline void partial_access(const Tensor& argument, const Tensor& part) {
  partial_access(argument, static_cast<double>(part.nbytes()));
}
}  // namespace cost

struct BoundClause;
struct OperatorInfo {
  const char *name, *parameters;  // as in the source
  bool reports_shape = false;
  // Looked up at the first call.
  std::atomic<const std::vector<BoundClause>*> rules{nullptr};
  std::atomic<const OperatorFacts*> known_facts{nullptr};
  std::atomic<uint64_t> accepted{0};  // ArgumentReader's key of the last call that passed
  const OperatorFacts& facts();
};

// Converts the arguments of a call and checks their dtypes.
class ArgumentReader {
 public:
  ArgumentReader(OperatorInfo& info, aclOpExecutor& executor)
      : info_(info),
        executor_(executor),
        tensors_(executor.tensors),
        ends_(executor.ends),
        signature_(&info) {}
  template <class T> [[gnu::noinline]] T take(typename Arg<T>::C value) {
    T taken = Arg<T>::get(value);
    if constexpr (reads_fractal<T>) unpack(taken, value);
    else refuse_fractal(value);
    if constexpr (std::is_same_v<T, Text>)
      integers_.push_back({static_cast<uint16_t>(ends_.size()), reinterpret_cast<int64_t>(value)});
    note(taken);
    return taken;
  }
  // Of an argument that was converted.
  template <class T> void note(const T& value) {
    collect(value);
    if constexpr (std::is_integral_v<T>)
      integers_.push_back({static_cast<uint16_t>(ends_.size()), static_cast<int64_t>(value)});
    ends_.push_back(static_cast<uint16_t>(tensors_.size()));
  }
  void check() const;
  void check_rules() const;
  const Signature& signature() const { return signature_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  void collect(const Tensor& value);
  void collect(const Opt<Tensor>& value);
  void collect(const Tensors& value);
  void collect(const Result& value);
  void collect(const Ints& values);
  void collect(const Text& value);
  void collect(const Scalar& value) { signature_.add(value); }
  void collect(const Opt<Scalar>& value) { value ? signature_.add(*value) : signature_.mix(0); }
  void collect(const DType& value) { signature_.mix(static_cast<uint64_t>(value.value)); }
  void collect(const Stored& value);
  void collect(const Weight& value);
  void collect(const Weights& value);
  void unpack(Weight& taken, const aclTensor* given);
  void unpack(Weights& taken, const aclTensorList* given);
  void unpack(Stored&, const aclTensor*) {}
  void refuse_fractal(const aclTensor* given) const;
  void refuse_fractal(const aclTensorList* given) const;
  template <class T> void refuse_fractal(const T&) const {}
  uint64_t key() const;
  std::string name() const { return nth(info_.parameters, static_cast<int64_t>(ends_.size())); }
  bool holds(const BoundClause& bound) const;
  template <class T> void collect(const T& value) {
    if constexpr (std::is_floating_point_v<T>) {
      signature_.add(static_cast<double>(value));
    } else if constexpr (std::is_integral_v<T>) {
      signature_.add(static_cast<int64_t>(value));
    } else if constexpr (requires { value.begin(); }) {  // Scalars, Bools, Floats, Text
      for (const auto& each : value) collect(each);
      signature_.mix(value.size());
    } else if constexpr (requires { value.has_value(); }) {
      if (value) collect(*value);
      signature_.mix(value.has_value());
    }
  }

  OperatorInfo& info_;
  aclOpExecutor& executor_;
  std::vector<Tensor>& tensors_;
  c10::SmallVector<uint16_t, 16>& ends_;
  c10::SmallVector<std::pair<uint16_t, int64_t>, 8> integers_;  // or texts, by position
  Signature signature_;
};

// GetWorkspaceSize without the operator's types: `take` converts the arguments and returns the
// computation.
int prepare(OperatorInfo& info, c10::function_ref<Computation(ArgumentReader&)> take,
    uint64_t* bytes, aclOpExecutor** executor);

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

// The parameters of a call. A std::tuple compiles more slowly.
template <size_t, class T> struct CallArgument {
  T value;
};
template <class Indices, class... Params> struct CallArguments;
template <size_t... I, class... Params> struct CallArguments<std::index_sequence<I...>, Params...>
    : CallArgument<I, Params>... {
  template <class Function> decltype(auto) apply(Function&& function) {
    return function(static_cast<CallArgument<I, Params>&>(*this).value...);
  }
  template <class R> R call(R (*function)(Params...)) const {
    return function(static_cast<const CallArgument<I, Params>&>(*this).value...);
  }
  CallArguments standing_in(StandIns& stand_ins) const {
    return {
        {stood_in<Params>(stand_ins, static_cast<const CallArgument<I, Params>&>(*this).value)}...};
  }
};

// GetWorkspaceSize of all operators whose bodies have these parameters.
template <class R, class List, class... Params> struct Prepared;
template <class R, class... T, class... Params> struct Prepared<R, Types<T...>, Params...> {
  using Body = R (*)(Params...);
  using Checks = void (*)(Params...);  // null: none
  using Held = CallArguments<std::index_sequence_for<Params...>, Params...>;

  [[gnu::noinline]] static int workspace(OperatorInfo& info, Body body, Checks checks, bool dry_run,
      typename Arg<T>::C... args, uint64_t* bytes, aclOpExecutor** executor) {
    return prepare(
        info,
        [&](ArgumentReader& reader) -> Computation {
          Held held = take(reader, args...);
          reader.check();
          if constexpr (!std::is_void_v<R>) {
            return held.call(body);
          } else {
            if (checks) held.call(checks);
            if (dry_run) {  // of a signature that is seen for the first time
              try_out(reader.signature(), reader.tensors(), [&](StandIns& stand_ins) {
                const Held small = held.standing_in(stand_ins);
                if (checks) small.call(checks);
                small.call(body);
              });
            }
            return [body, held = std::move(held)] { held.call(body); };
          }
        },
        bytes, executor);
  }

  static Held take(ArgumentReader& reader, typename Arg<T>::C... args) {
    if constexpr ((HasFields<Params> || ...)) {
      Held held;
      held.apply([](auto&... each) { return std::tuple_cat(fields_of(each)...); }) =
          std::tuple<T...>{reader.take<T>(args)...};
      return held;
    } else {
      return {{reader.take<T>(args)}...};
    }
  }
};

// GetWorkspaceSize of one operator. Body computes, or checks and returns a Computation.
template <auto Body, class Name, class List = void> struct Operator;
template <class... Params, class R, R (*Body)(Params...), class Name> struct Operator<Body, Name>
    : Operator<Body, Name, decltype(flat<Params...>())> {};
template <class R, class... Params, R (*Body)(Params...), class Name, class... T>
struct Operator<Body, Name, Types<T...>> {
  static constexpr char kinds[] = {kind_of<typename Arg<T>::C>()..., 0};
  static_assert(is_called_with(Name::text, kinds),
      "the parameters are not the arguments of op-plugin's calls (facts/arguments.toml)");

  static int workspace(typename Arg<T>::C... args, uint64_t* bytes, aclOpExecutor** executor) {
    static OperatorInfo info{
        Name::text, parameters_of<Params...>(Name::parameters), (std::is_same_v<T, Result> || ...)};
    return Prepared<R, Types<T...>, Params...>::workspace(
        info, Body, Name::checks(), Name::dry_run, args..., bytes, executor);
  }
};

// Registers the executor for launch(), which accepts it once, or discard().
aclOpExecutor* hand_out(std::unique_ptr<aclOpExecutor> made);
bool discard(aclOpExecutor* executor);  // false if it is not registered
int launch(const char* name, aclOpExecutor* executor, void* stream);

}  // namespace emu

// A C symbol that is an ifunc and resolves to a typed function, so the C signature is not repeated.
#define RESOLVED(SYMBOL, ...)                                                       \
  extern "C" {                                                                      \
  static void* resolve_##SYMBOL() { return reinterpret_cast<void*>(&__VA_ARGS__); } \
  __attribute__((visibility("default"), ifunc("resolve_" #SYMBOL))) void SYMBOL();  \
  }
#define OPERATOR_BODY(RETURN, DRY_RUN, CHECKS, NAME, PARAMS, ...)                             \
  namespace emu::ops {                                                                        \
  struct name_##NAME {                                                                        \
    static constexpr const char *text = #NAME, *parameters = #PARAMS;                         \
    static constexpr bool dry_run = DRY_RUN;                                                  \
    static constexpr auto checks() { return CHECKS; }                                         \
  };                                                                                          \
  static RETURN body_##NAME PARAMS __VA_ARGS__ static const Registration registration_##NAME{ \
      #NAME, computed, __FILE__};                                                             \
  }
#define OPERATOR(RETURN, DRY_RUN, CHECKS, NAME, PARAMS, ...)                   \
  OPERATOR_BODY(RETURN, DRY_RUN, CHECKS, NAME, PARAMS, __VA_ARGS__)            \
  RESOLVED(NAME##GetWorkspaceSize,                                             \
      emu::Operator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace) \
  EXPORT int NAME(void*, uint64_t, aclOpExecutor* executor, void* stream) {    \
    return emu::launch(#NAME, executor, stream);                               \
  }
#define OP(NAME, PARAMS, ...) OPERATOR(void, true, nullptr, NAME, PARAMS, __VA_ARGS__)
// For outputs whose size is that of a value, which stand-ins do not have.
#define OP_OF_VALUES(NAME, PARAMS, ...) OPERATOR(void, false, nullptr, NAME, PARAMS, __VA_ARGS__)
#define CHECKED(NAME, PARAMS, ...) OPERATOR(Computation, false, nullptr, NAME, PARAMS, __VA_ARGS__)
#define COMPUTE return [=]() mutable
#define SHAPED(NAME, PARAMS, CHECKS, ...)      \
  namespace emu::ops {                         \
  static void checks_##NAME PARAMS { CHECKS; } \
  }                                            \
  OPERATOR(void, true, &checks_##NAME, NAME, PARAMS, __VA_ARGS__)
