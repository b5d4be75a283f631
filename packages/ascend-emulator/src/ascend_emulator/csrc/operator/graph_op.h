// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators (aclop), which aclopCompileAndExecute looks up by their type.
//
//   GRAPH_OP(Swish, (Tensor x, Out y, Attributes attributes), {
//     const auto scale = attributes.get("scale", 1.0f);  // checks run in aclopCompileAndExecute
//     SAME(y, x);
//     COMPUTE { y.copy_(x * at::sigmoid(x * scale)); };  // runs on the stream
//   })
//
// The parameters are the inputs, the outputs and the attributes of op-plugin's OpCommand in
// op_plugin/ops/aclops (BSD), in this order. Inputs in host memory are read at the call; Ints and
// Scalar must be there. Inputs that need not be given are Opt; Tensors are all that are left. All
// attributes of a call must have been read when the body returns; another one is refused by its
// name.
#pragma once
#include <map>
#include <set>
#include <variant>

#include "compile_options.h"
#include "shapes.h"

namespace emu {

using Attribute = std::variant<bool, int64_t, float, Text, Ints, Floats, Bools, std::vector<Ints>>;

// Attributes of one call. Copies share what was read.
class Attributes {
 public:
  Attributes() = default;
  explicit Attributes(const std::map<std::string, Attribute>& values) : values_(&values) {}

  template <class T> T get(const char* name, T otherwise) const {
    const auto* found = find(name);
    if (!found) return otherwise;
    const auto* value = std::get_if<T>(found);
    require(value != nullptr, "attribute ", name, " has another type");
    return *value;
  }
  // The attribute has this value, if it is given.
  template <class T> void only(const char* name, const T& value) const {
    const auto found = get(name, value);
    require(found == value, "attribute ", name, " is ", found, "; computed: ", value);
  }
  void all_read() const;

 private:
  const Attribute* find(const char* name) const;
  const std::map<std::string, Attribute>* values_ = nullptr;
  std::shared_ptr<std::set<std::string>> read_ = std::make_shared<std::set<std::string>>();
};

struct Out : Tensor {};
template <class T> const T& as_argument(const T& argument) { return argument; }
inline const Tensor& as_argument(const Out& argument) { return argument; }

struct GraphCall {
  std::vector<Tensor> inputs, outputs;  // undefined: not given
  std::vector<bool> on_host;            // of each input
  Attributes attributes;
};

// Takes the arguments of a call one after the other.
class GraphReader {
 public:
  GraphReader(const GraphCall& call, const char* parameters)
      : call_(call), parameters_(parameters) {}
  template <class T> [[gnu::noinline]] T take() {
    const auto name = nth(parameters_, position_++);
    if constexpr (std::is_same_v<T, Attributes>) {
      return call_.attributes;
    } else if constexpr (std::is_same_v<T, Out>) {
      return {output(name)};
    } else if constexpr (std::is_same_v<T, Tensors>) {
      Tensors taken;
      while (input_ < call_.inputs.size()) taken.push_back(input(name));
      return taken;
    } else if constexpr (std::is_same_v<T, Opt<Tensor>> || std::is_same_v<T, Opt<Scalar>>) {
      if (input_ == call_.inputs.size() || !call_.inputs[input_].defined())
        return ++input_, std::nullopt;
      return convert<typename T::value_type>(name);
    } else {
      return convert<T>(name);
    }
  }
  void finish() const;  // refuses a call with further inputs or outputs

 private:
  template <class T> T convert(const std::string& name) {
    if constexpr (std::is_same_v<T, Tensor>) {
      return input(name);
    } else if constexpr (std::is_same_v<T, Scalar>) {
      return on_host(name).item();
    } else {
      static_assert(std::is_same_v<T, Ints>);
      const auto values = on_host(name).to(at::kLong);
      return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
    }
  }
  Tensor input(const std::string& name);
  Tensor on_host(const std::string& name);
  Tensor output(const std::string& name);
  const GraphCall& call_;
  const char* parameters_;
  int64_t position_ = 0;
  size_t input_ = 0, output_ = 0;
};

// What is done with a parameter of one type.
struct GraphParameterType {
  void (*take)(GraphReader& reader, void* at);
  void (*note)(ArgumentReader& rules, const void* value);
  void (*destroy)(void* value);
};
template <class T> inline constexpr GraphParameterType kGraphParameterType{
    [](GraphReader& reader, void* at) { new (at) T(reader.take<T>()); },
    [](ArgumentReader& rules, const void* value) {
      rules.note(as_argument(*static_cast<const T*>(value)));
    },
    &destroy_value<T>};
template <class... Params> inline constexpr const GraphParameterType* kGraphTypes[] = {
    &kGraphParameterType<Params>..., nullptr};
template <class... Params>
inline constexpr ParameterList<GraphParameterType> kGraphParameters{sizeof...(Params),
    kGraphTypes<Params...>, kOffsets<Params...>.data(), &call_erased<Computation, Params...>};

struct GraphOperator {
  const char* type;
  OperatorInfo info;  // its name is that in the registry, "aclop::Swish"
  void (*body)();     // Computation (*)(parameters)
  const ParameterList<GraphParameterType>& parameters;
};
// Adds an operator to the table.
struct GraphRegistration {
  GraphRegistration(GraphOperator& op, const char* file);
};
template <class... Params> GraphOperator graph_operator(
    const char* type, const char* entry, const char* parameters, Computation (*body)(Params...)) {
  return {type, {entry, parameters}, erased(body), kGraphParameters<Params...>};
}

}  // namespace emu

#define GRAPH_OP(TYPE, PARAMS, ...)                                                        \
  namespace emu::graph_ops {                                                               \
  static Computation body_##TYPE PARAMS __VA_ARGS__ static GraphOperator operator_##TYPE = \
      graph_operator(#TYPE, "aclop::" #TYPE, #PARAMS, &body_##TYPE);                       \
  static const GraphRegistration registration_##TYPE(operator_##TYPE, __FILE__);           \
  }
