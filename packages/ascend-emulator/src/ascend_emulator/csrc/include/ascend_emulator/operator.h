// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators of your own on the emulator: what an AscendC kernel computes, written in C++ with ATen.
//
//   #include <ATen/ATen.h>
//   #include <ascend_emulator/operator.h>
//
//   ASCEND_EMULATOR_OPERATOR(aclnnAddCustom, (at::Tensor x, at::Tensor y, double alpha, at::Tensor
//   out), {
//     at::add_out(out, x, y, alpha);
//   })
//
// This defines the two C functions that your torch extension looks up,
// `aclnnAddCustomGetWorkspaceSize(const aclTensor*, const aclTensor*, double, const aclTensor*,
// uint64_t*, aclOpExecutor**)` and `aclnnAddCustom(void*, uint64_t, aclOpExecutor*, aclrtStream)`.
// ASCEND_EMULATOR_OPERATORS=add.cpp compiles the file into the library in which operators are
// looked up first (libcust_opapi.so). The body runs on the stream; an exception fails the stream.
// Parameters are of the types that have an Arg below, in the order of the kernel's host function.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A tensor of a running operator, in memory of this CPU. `sizes` is null for an optional tensor
// that was not given.
typedef struct AscendEmulatorTensor {
  void* data;
  const int64_t *sizes, *strides;  // strides in elements
  int32_t rank, dtype;             // aclDataType
} AscendEmulatorTensor;

typedef enum AscendEmulatorKind {
  kAscendEmulatorTensor,          // const aclTensor*
  kAscendEmulatorOptionalTensor,  // const aclTensor*, perhaps null
  kAscendEmulatorTensors,         // const aclTensorList*
  kAscendEmulatorScalar,          // const aclScalar*
  kAscendEmulatorInts,            // const aclIntArray*
  kAscendEmulatorFloats,          // const aclFloatArray*
  kAscendEmulatorBools,           // const aclBoolArray*
  kAscendEmulatorText,            // const char*
  kAscendEmulatorInteger,
  kAscendEmulatorReal,
  kAscendEmulatorBoolean,
} AscendEmulatorKind;

// An argument of aclnnXxxGetWorkspaceSize.
typedef struct AscendEmulatorArgument {
  AscendEmulatorKind kind;
  const void* object;
  int64_t integer;
  double real;
} AscendEmulatorArgument;

// Computes. `tensors` are those of the arguments, lists flattened. Returns 0, or writes a message.
typedef int (*AscendEmulatorCompute)(
    void* context, const AscendEmulatorTensor* tensors, int count, char* message, int size);
typedef void (*AscendEmulatorRelease)(void* context);

// Functions of libascend_emulator.so. `parameters` names the arguments: "(x, y, alpha, out)".
// Statuses are those of aclnn. ascend_emulator_prepare is what aclnnXxxGetWorkspaceSize does: it
// checks the tensors' memory, and takes `context`.
typedef int AscendEmulatorPrepare(const char* name, const char* parameters,
    const AscendEmulatorArgument* arguments, int count, AscendEmulatorCompute compute,
    void* context, AscendEmulatorRelease release, uint64_t* workspace, void** executor);
// As above, computed by the Python function "module:function" or "/path/file.py:function".
typedef int AscendEmulatorPreparePython(const char* name, const char* parameters,
    const AscendEmulatorArgument* arguments, int count, const char* function, uint64_t* workspace,
    void** executor);
typedef int AscendEmulatorLaunch(const char* name, void* executor, void* stream);
typedef int AscendEmulatorFail(const char* name, const char* message);
// Number of values or tensors, -1 if the object is null. `values`: int64_t, float or uint8_t
// (bool).
typedef int64_t AscendEmulatorValues(
    AscendEmulatorKind kind, const void* object, void* values, int64_t most);
// 0 real, 1 integer, 2 bool, -1 null or another type
typedef int AscendEmulatorScalarOf(const void* object, double* real, int64_t* integer);

#ifdef __cplusplus
}  // extern "C"

#ifndef ASCEND_EMULATOR_NO_ATEN
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ascend_emulator {

// A function of the emulator that runs in this process.
template <class Function> Function* function(const char* name) {
  void* library = dlopen("libascend_emulator.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = library ? dlsym(library, name) : nullptr;
  if (!found)
    throw std::runtime_error(
        std::string("no NPU is emulated in this process, or this emulator has no ") + name);
  return reinterpret_cast<Function*>(found);
}

inline at::ScalarType scalar_type(int32_t dtype) {
  switch (dtype) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 9: return at::kLong;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
    case 35: return at::kFloat8_e5m2;
    case 36: return at::kFloat8_e4m3fn;
  }
  throw std::runtime_error("aclDataType " + std::to_string(dtype) + " has no at::ScalarType");
}

inline at::Tensor tensor(const AscendEmulatorTensor& view) {
  if (!view.sizes) return {};
  const auto rank = static_cast<size_t>(view.rank);
  return at::from_blob(view.data, at::IntArrayRef(view.sizes, rank),
      at::IntArrayRef(view.strides, rank), at::TensorOptions().dtype(scalar_type(view.dtype)));
}

template <class Value> std::vector<Value> values(AscendEmulatorKind kind, const void* object) {
  static auto* const read = function<AscendEmulatorValues>("ascend_emulator_values");
  const int64_t size = read(kind, object, nullptr, 0);
  if (size < 0) throw std::invalid_argument("a required array is null");
  std::vector<Value> found(static_cast<size_t>(size));
  read(kind, object, found.data(), size);
  return found;
}

// Arg<T>: the C type of a parameter, what is read when the operator is called, and the value when
// it runs.
template <class T, class = void> struct Arg;
template <> struct Arg<at::Tensor> {
  using C = const void*;
  static AscendEmulatorArgument describe(C object) { return {kAscendEmulatorTensor, object, 0, 0}; }
  static int read(C) { return 0; }
  static at::Tensor value(int, const AscendEmulatorTensor*& next) { return tensor(*next++); }
};
template <> struct Arg<std::optional<at::Tensor>> {
  using C = const void*;
  static AscendEmulatorArgument describe(C object) {
    return {kAscendEmulatorOptionalTensor, object, 0, 0};
  }
  static int read(C) { return 0; }
  static std::optional<at::Tensor> value(int, const AscendEmulatorTensor*& next) {
    const auto& view = *next++;
    return view.sizes ? std::optional<at::Tensor>(tensor(view)) : std::nullopt;
  }
};
template <> struct Arg<std::vector<at::Tensor>> {
  using C = const void*;
  static AscendEmulatorArgument describe(C object) {
    return {kAscendEmulatorTensors, object, 0, 0};
  }
  static int64_t read(C object) {
    return function<AscendEmulatorValues>("ascend_emulator_values")(
        kAscendEmulatorTensors, object, nullptr, 0);
  }
  static std::vector<at::Tensor> value(int64_t size, const AscendEmulatorTensor*& next) {
    std::vector<at::Tensor> found;
    for (int64_t i = 0; i < size; ++i) found.push_back(tensor(*next++));
    return found;
  }
};
// What is read when the operator is called is its value.
template <class T, AscendEmulatorKind Kind> struct Read {
  using C = const void*;
  static AscendEmulatorArgument describe(C object) { return {Kind, object, 0, 0}; }
  static const T& value(const T& held, const AscendEmulatorTensor*&) { return held; }
};
template <> struct Arg<at::Scalar> : Read<at::Scalar, kAscendEmulatorScalar> {
  static at::Scalar read(C object) {
    double real = 0;
    int64_t integer = 0;
    switch (function<AscendEmulatorScalarOf>("ascend_emulator_scalar")(object, &real, &integer)) {
      case 0: return real;
      case 1: return integer;
      case 2: return integer != 0;
    }
    throw std::invalid_argument("a scalar is null, or complex");
  }
};
template <> struct Arg<std::vector<int64_t>> : Read<std::vector<int64_t>, kAscendEmulatorInts> {
  static std::vector<int64_t> read(C object) {
    return values<int64_t>(kAscendEmulatorInts, object);
  }
};
template <> struct Arg<std::vector<float>> : Read<std::vector<float>, kAscendEmulatorFloats> {
  static std::vector<float> read(C object) { return values<float>(kAscendEmulatorFloats, object); }
};
template <> struct Arg<std::vector<bool>> : Read<std::vector<bool>, kAscendEmulatorBools> {
  static std::vector<bool> read(C object) {
    const auto bytes = values<uint8_t>(kAscendEmulatorBools, object);
    return {bytes.begin(), bytes.end()};
  }
};
template <> struct Arg<std::string> : Read<std::string, kAscendEmulatorText> {
  using C = const char*;
  static std::string read(C text) { return text ? text : ""; }
};
template <class T> struct Arg<T, std::enable_if_t<std::is_arithmetic_v<T>>>
    : Read<T, kAscendEmulatorInteger> {
  using C = T;
  static AscendEmulatorArgument describe(C value) {
    if constexpr (std::is_floating_point_v<T>)
      return {kAscendEmulatorReal, nullptr, 0, static_cast<double>(value)};
    return {std::is_same_v<T, bool> ? kAscendEmulatorBoolean : kAscendEmulatorInteger, nullptr,
        static_cast<int64_t>(value), 0};
  }
  static T read(C value) { return value; }
};

// The C functions of one operator.
template <auto Body, class Name> struct Operator;
template <class... Params, void (*Body)(Params...), class Name> struct Operator<Body, Name> {
  template <class T> using Of = Arg<std::decay_t<T>>;
  struct Call {
    std::tuple<decltype(Of<Params>::read(std::declval<typename Of<Params>::C>()))...> held;
  };

  static int compute(
      void* context, const AscendEmulatorTensor* next, int, char* message, int size) {
    try {
      std::apply(
          [&](const auto&... held) {
            std::tuple<std::decay_t<Params>...> given{
                Of<Params>::value(held, next)...};  // in this order
            std::apply([](auto&... each) { Body(each...); }, given);
          },
          static_cast<const Call*>(context)->held);
      return 0;
    } catch (const std::exception& e) {
      const std::string what = e.what();
      what.substr(0, what.find("\nException raised from"))
          .copy(message, static_cast<size_t>(size) - 1);
      return 1;
    }
  }

  static int workspace(typename Of<Params>::C... given, uint64_t* bytes, void** executor) {
    try {
      const AscendEmulatorArgument arguments[] = {Of<Params>::describe(given)...};
      auto call = std::make_unique<Call>(Call{{Of<Params>::read(given)...}});
      static auto* const prepare = function<AscendEmulatorPrepare>("ascend_emulator_prepare");
      return prepare(
          Name::text, Name::parameters, arguments, sizeof...(Params), &compute, call.release(),
          [](void* context) { delete static_cast<Call*>(context); }, bytes, executor);
    } catch (const std::exception& e) {
      return function<AscendEmulatorFail>("ascend_emulator_fail")(Name::text, e.what());
    }
  }

  static int launch(void* executor, void* stream) {
    static auto* const run = function<AscendEmulatorLaunch>("ascend_emulator_launch");
    return run(Name::text, executor, stream);
  }
};

}  // namespace ascend_emulator

// The symbol of GetWorkspaceSize is an ifunc that resolves to the typed function above.
#define ASCEND_EMULATOR_OPERATOR(NAME, PARAMS, ...)                                                \
  static void compute_##NAME PARAMS __VA_ARGS__ struct name_##NAME {                               \
    static constexpr const char *text = #NAME, *parameters = #PARAMS;                              \
  };                                                                                               \
  extern "C" {                                                                                     \
  static void* resolve_##NAME() {                                                                  \
    return reinterpret_cast<void*>(                                                                \
        &ascend_emulator::Operator<&compute_##NAME, name_##NAME>::workspace);                      \
  }                                                                                                \
  __attribute__((visibility("default"), ifunc("resolve_" #NAME))) void NAME##GetWorkspaceSize();   \
  __attribute__((visibility("default"))) int NAME(void*, uint64_t, void* executor, void* stream) { \
    return ascend_emulator::Operator<&compute_##NAME, name_##NAME>::launch(executor, stream);      \
  }                                                                                                \
  }
#endif  // ASCEND_EMULATOR_NO_ATEN
#endif  // __cplusplus
