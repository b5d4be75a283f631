// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The C arguments of an operator as C++ values: conversions, and the reader that checks them.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include <atomic>
#include <memory>
#include <optional>

#include "checks.h"
#include "computation.h"
#include "core/cost.h"
#include "dry_run.h"
#include "facts.h"
#include "rule_table.h"
#include "tensor.h"

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

}  // namespace emu
