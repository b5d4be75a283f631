// Macros that define an operator.
//
//   OP(aclnnSilu, (Tensor self, Tensor out), { at::silu_out(out, self); })
//
//   CHECKED(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), {
//     one_of("x", x, kFloating);        // runs in aclnnSwiGluGetWorkspaceSize, on the thread that calls the operator
//     COMPUTE { swiglu(x, dim, out); };  // runs on the stream
//   })
//
//   // The third argument has checks of shapes.h.
//   SHAPED(aclnnTriu, (Tensor self, int64_t diagonal, Tensor out), SAME(out, self), { at::triu_out(out, self, diagonal); })
//
// The macros define both C functions that torch_npu looks up: `aclnnSiluGetWorkspaceSize(const aclTensor*, const aclTensor*,
// uint64_t*, aclOpExecutor**)`, which records the arguments, and `aclnnSilu(void*, uint64_t, aclOpExecutor*, aclrtStream)`, which
// submits it to the stream. The C parameter list follows from the C++ one (Arg below), so write the parameters in the order of
// the EXEC_NPU_CMD call sites in Ascend/op-plugin (BSD). torch_npu raises the error of a check at the call, the error of a
// computation when the stream is synchronized. Tensor values may be read in the computation only. A replayed graph runs the
// computation again, from unchanged captured arguments.
#ifndef ASCEND_EMULATOR_OPERATOR_OP_H
#define ASCEND_EMULATOR_OPERATOR_OP_H
#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <optional>
#include <tuple>

#include "checks.h"
#include "core/cost.h"
#include "core/recheck.h"
#include "core/registry.h"
#include "tensor.h"
#include "workspace.h"

namespace emu {

// Callable that an operator executes on the stream. Each execution calls a copy, because a computation may modify its captures
// and a replayed graph executes it again.
class Computation {
 public:
  Computation() = default;
  template <class Function, class = std::enable_if_t<!std::is_same_v<std::decay_t<Function>, Computation>>>
  Computation(Function function)
      : function_(new Function(std::move(function)), [](void* held) { delete static_cast<Function*>(held); }),
        run_([](void* held) {
          Function copy(*static_cast<const Function*>(held));
          copy();
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
  bool reports_shape = false;             // the caller reads an output's shape as soon as the operator is launched
  bool hangs = false;                     // injected fault
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
template <class T>
using Opt = std::optional<T>;
struct DType {
  at::ScalarType value;
  operator at::ScalarType() const { return value; }
};
// Output with a data-dependent shape: assign() writes the values and reports the shape (aclGetViewShape).
struct Result {
  aclTensor* tensor;
  void assign(const Tensor& value) const;
};

// Arg<T>: the C type of a parameter, and its conversion to T.
template <class T>
struct Arg {
  using C = T;
  static T get(C value) { return value; }
};
template <class T, class Object>
struct Boxed {
  using C = const Object*;
  static T get(C object) {
    required(object);
    return object->value;
  }
};
template <>
struct Arg<Tensor> : Boxed<Tensor, aclTensor> {};
template <>
struct Arg<Scalar> : Boxed<Scalar, aclScalar> {};
template <>
struct Arg<Ints> : Boxed<Ints, aclIntArray> {};
template <>
struct Arg<Floats> : Boxed<Floats, aclFloatArray> {};
template <>
struct Arg<Bools> : Boxed<Bools, aclBoolArray> {};
template <class T>
struct Arg<Opt<T>> {
  using C = typename Arg<T>::C;
  static Opt<T> get(C object) { return given(object) ? Opt<T>(Arg<T>::get(object)) : std::nullopt; }
};
template <>
struct Arg<Tensors> {
  using C = const aclTensorList*;
  static Tensors get(C list) {
    required(list);
    Tensors out;
    for (const auto* item : list->items) out.push_back(given(item) ? Arg<Tensor>::get(item) : Tensor());
    return out;
  }
};
template <>
struct Arg<Scalars> {
  using C = const aclScalarList*;
  static Scalars get(C list) {
    required(list);
    Scalars out;
    for (const auto* item : list->items) out.push_back(item->value);
    return out;
  }
};
template <>
struct Arg<Text> {
  using C = const char*;
  static Text get(C text) { return text ? text : ""; }
};
template <>
struct Arg<DType> {
  using C = int32_t;
  static DType get(C code) { return {to_scalar_type(code)}; }
};
template <>
struct Arg<Result> {
  using C = const aclTensor*;
  static Result get(C tensor) { return {const_cast<aclTensor*>(tensor)}; }
};

// Set of dtypes, one bit each. documented(): dtypes of an operator's first argument by torch_npu's documentation (dtypes.cpp);
// empty if undocumented.
using DTypeSet = uint64_t;
DTypeSet documented(const char* name);
// Throws if the dtype of a tensor in [first, last) is not supported by the chip or not in `allowed`. `parameters` is the
// parameter list as in the source, `position` the parameter's index in it.
void check_dtypes(
    const std::vector<Tensor>& tensors, size_t first, size_t last, DTypeSet allowed, const char* parameters, int position);
// For computations (core/cost.h): the number of accessed bytes of an argument, or the accessed part.
namespace cost {
inline void partial_access(const Tensor& argument, double bytes) {
  partial_access(argument.const_data_ptr(), argument.nbytes(), bytes);
}
inline void partial_access(const Tensor& argument, const Tensor& part) {
  partial_access(argument, static_cast<double>(part.nbytes()));
}
}  // namespace cost

struct OperatorInfo {
  const char *name, *parameters;  // as in the source
  bool reports_shape;
  std::atomic<DTypeSet> allowed{~DTypeSet{0}};       // of the first argument; looked up at the first call
  std::atomic<const Workspace*> workspace{nullptr};  // looked up at the first call
};

// Converts the arguments of a call and checks their dtypes.
class ArgumentReader {
 public:
  ArgumentReader(OperatorInfo& info, aclOpExecutor& executor) : info_(info), tensors_(executor.tensors), ends_(executor.ends) {}
  template <class T>
  T take(typename Arg<T>::C value) {
    T taken = Arg<T>::get(value);
    collect(taken);
    ends_.push_back(static_cast<uint16_t>(tensors_.size()));
    return taken;
  }
  void check() const;

 private:
  void collect(const Tensor& value);
  void collect(const Opt<Tensor>& value);
  void collect(const Tensors& value);
  void collect(const Result& value);
  template <class T>
  void collect(const T&) {}

  OperatorInfo& info_;
  std::vector<Tensor>& tensors_;
  c10::SmallVector<uint16_t, 16>& ends_;
};

// GetWorkspaceSize without the operator's types: `take` converts the arguments and returns the computation.
int prepare(OperatorInfo& info, c10::function_ref<Computation(ArgumentReader&)> take, uint64_t* bytes, aclOpExecutor** executor);

// GetWorkspaceSize of one operator. Body computes, or checks and returns a Computation.
template <auto Body, class Name>
struct Operator;
template <class R, class... Params, R (*Body)(Params...), class Name>
struct Operator<Body, Name> {
  static int workspace(typename Arg<Params>::C... args, uint64_t* bytes, aclOpExecutor** executor) {
    static constinit OperatorInfo info{Name::text, Name::parameters, (std::is_same_v<Params, Result> || ...)};
    return prepare(
        info,
        [&](ArgumentReader& reader) -> Computation {
          std::tuple<Params...> held{reader.take<Params>(args)...};
          reader.check();
          if constexpr (std::is_void_v<R>) {
            return [held = std::move(held)]() mutable { std::apply(Body, std::move(held)); };
          } else {
            return std::apply(Body, std::move(held));
          }
        },
        bytes, executor);
  }
};

int launch(const char* name, aclOpExecutor* executor, void* stream);

}  // namespace emu

// The GetWorkspaceSize symbol is an ifunc that resolves to the typed function above, so the C signature is not repeated.
#define OPERATOR(RETURN, NAME, PARAMS, ...)                                                                              \
  namespace emu::ops {                                                                                                   \
  struct name_##NAME {                                                                                                   \
    static constexpr const char *text = #NAME, *parameters = #PARAMS;                                                    \
  };                                                                                                                     \
  static RETURN body_##NAME PARAMS __VA_ARGS__ static const Registration registration_##NAME{#NAME, computed, __FILE__}; \
  }                                                                                                                      \
  extern "C" {                                                                                                           \
  static void* resolve_##NAME() {                                                                                        \
    return reinterpret_cast<void*>(&emu::Operator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace);            \
  }                                                                                                                      \
  __attribute__((visibility("default"), ifunc("resolve_" #NAME))) void NAME##GetWorkspaceSize();                         \
  }                                                                                                                      \
  EXPORT int NAME(void*, uint64_t, aclOpExecutor* executor, void* stream) { return emu::launch(#NAME, executor, stream); }
#define OP(NAME, PARAMS, ...) OPERATOR(void, NAME, PARAMS, __VA_ARGS__)
#define CHECKED(NAME, PARAMS, ...) OPERATOR(Computation, NAME, PARAMS, __VA_ARGS__)
#define COMPUTE return [=]() mutable
#define SHAPED(NAME, PARAMS, CHECKS, ...) \
  CHECKED(NAME, PARAMS, {                 \
    CHECKS;                               \
    COMPUTE __VA_ARGS__;                  \
  })

#endif  // ASCEND_EMULATOR_OPERATOR_OP_H
