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
#include "core/entry_point.h"
#include "core/refusal.h"
#include "parameters.h"
#include "signature.h"

namespace emu {

// The functions of one operator, of any parameters.
struct Bodies {
  void (*body)();    // computes, or checks and returns a Computation
  void (*checks)();  // null: none
  bool returns_computation, dry_run;
};
template <class Function> void (*erased(Function function))() {
  if constexpr (std::is_null_pointer_v<Function>) return nullptr;
  else return reinterpret_cast<void (*)()>(function);
}
// GetWorkspaceSize of any operator.
int workspace(OperatorInfo& info, const ParameterList<ParameterType>& parameters,
    const Bodies& bodies, const Raw* arguments, uint64_t* bytes, aclOpExecutor** executor);

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
    const Raw arguments[] = {Raw(args)..., Raw(nullptr)};
    return emu::workspace(info, kParameters<R, Params...>,
        {erased(Body), erased(Name::checks()), !std::is_void_v<R>, Name::dry_run}, arguments, bytes,
        executor);
  }
};

// Registers the executor for launch(), which accepts it once, or discard().
aclOpExecutor* hand_out(std::unique_ptr<aclOpExecutor> made);
bool discard(aclOpExecutor* executor);  // false if it is not registered
// given: bytes of the workspace that the caller has.
int launch(const char* name, aclOpExecutor* executor, void* stream, uint64_t given = UINT64_MAX);

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
#define OPERATOR(RETURN, DRY_RUN, CHECKS, NAME, PARAMS, ...)                      \
  OPERATOR_BODY(RETURN, DRY_RUN, CHECKS, NAME, PARAMS, __VA_ARGS__)               \
  RESOLVED(NAME##GetWorkspaceSize,                                                \
      emu::Operator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace)    \
  EXPORT int NAME(void*, uint64_t given, aclOpExecutor* executor, void* stream) { \
    return emu::launch(#NAME, executor, stream, given);                           \
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
