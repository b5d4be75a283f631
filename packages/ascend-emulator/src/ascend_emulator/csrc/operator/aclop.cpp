// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators (aclop). torch_npu uses them where op-plugin has no aclnn operator for a
// call, where jit-compilation is on, and where an aclnn symbol is missing; the emulator defines all
// aclnn symbols. Those of GRAPH_OP are computed, others refuse with their type. An Identity from a
// format to itself, which npu_format_cast(x, 3) executes when internal formats are off, the default
// (torch_npu's FormatCastKernelNpu.cpp), copies bytes. Call sites:
// torch_npu/csrc/framework/OpParamMaker.cpp (BSD).
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/device.h"
#include "core/fault.h"
#include "core/trace.h"
#include "graph_op.h"

using namespace emu;

namespace {
using Values = std::map<std::string, Attribute>;
struct TensorDesc {
  int32_t type, format;
  std::vector<int64_t> dims;
  int32_t storage_format = format;
  std::vector<int64_t> storage_dims = dims;
  int32_t placement = 0;  // aclMemType: 0 is device memory
};
struct DataBuffer {
  void* data;
  size_t bytes;
};
const TensorDesc& desc_of(const void* desc) { return *static_cast<const TensorDesc*>(desc); }
const DataBuffer& buffer_of(const void* buffer) { return *static_cast<const DataBuffer*>(buffer); }

std::map<std::string_view, GraphOperator*>& table() {
  static auto* operators = new std::map<std::string_view, GraphOperator*>;  // filled before main()
  return *operators;
}

constexpr int32_t kJitCompile = 10;  // ACL_OP_JIT_COMPILE

// "Atlas训练系列产品、Atlas推理系列产品：默认值jit_compile=True" (torch_npu's documentation of
// set_compile_mode).
bool compiles_by_default() { return is_chip("Ascend310P") || is_chip("Ascend910A"); }

int refuse_aclop(const char* op_type) {
  if (!op_type) op_type = "(null)";
  return operator_done(op_type,
      fail(kUnsupported,
          text("the legacy graph operator '", op_type,
              "' (aclopCompileAndExecute) is not emulated; ",
              compiles_at_run_time()
                  ? text("torch_npu reaches it because jit_compile is on, ",
                        compiles_by_default() ? text("the default on ", chip().name)
                                              : std::string("as this process has set it"),
                        ", where each operator is compiled for each new shape; fix: "
                        "torch_npu.npu.set_compile_mode(jit_compile=False) before the first tensor")
                  : std::string("torch_npu reaches it only where it has no aclnn operator for this "
                                "call"))));
}

bool changes_nothing(const void* input, const void* output, const void* from, const void* to) {
  return desc_of(input).type == desc_of(output).type &&
         desc_of(input).storage_format == desc_of(output).storage_format &&
         buffer_of(from).bytes == buffer_of(to).bytes;
}

int copy_bytes(const DataBuffer& from, const DataBuffer& to, void* stream) {
  return guarded("Identity", [&] {
    auto task = std::make_unique<aclOpExecutor>();
    if (const auto bytes = static_cast<int64_t>(to.bytes)) {
      task->tensors = {at::from_blob(to_kernel(from.data), bytes, at::kByte),
          at::from_blob(to_kernel(to.data), bytes, at::kByte)};
      task->compute = [tensors = task->tensors] { tensors[1].copy_(tensors[0]); };
    } else {
      task->compute = [] {};
    }
    check(
        launch("Identity", hand_out(std::move(task)), stream) == kOk, kOpFailed, "the copy failed");
  });
}

// Formats whose memory is in the order of the dimensions: NCHW, NHWC, ND, NCDHW (aclFormat, CANN's
// API reference).
bool is_plain(int32_t format) { return format == 0 || format == 1 || format == 2 || format == 30; }

// Undefined for an input that is not given (ACL_DT_UNDEFINED). One in FRACTAL_NZ is a copy in
// row-major order: each execution reads inputs into it, and writes outputs from it.
Tensor tensor_of(const void* given_desc, const void* given_buffer, const std::string& what,
    std::vector<Fractal>& fractals) {
  const auto& desc = desc_of(given_desc);
  const auto& buffer = buffer_of(given_buffer);
  if (desc.type < 0) return {};
  const auto dtype = to_scalar_type(desc.type);
  const bool fractal = desc.storage_format == kFractalNZ && desc.dims.size() >= 2 &&
                       desc.storage_dims.size() == desc.dims.size() + 2;
  require(fractal || is_plain(desc.storage_format), what, " is in format ", desc.storage_format,
      "; computed: ND and FRACTAL_NZ, npu_format_cast(tensor, 2)");
  require(desc.dims.size() <= 8, what, " has ", desc.dims.size(), " dimensions; allowed: up to 8");
  const auto& stored = fractal ? desc.storage_dims : desc.dims;
  const auto bytes = static_cast<size_t>(c10::multiply_integers(stored)) * c10::elementSize(dtype);
  require(bytes <= buffer.bytes, what, " of shape ", at::IntArrayRef(desc.dims), " needs ", bytes,
      " bytes; its buffer has ", buffer.bytes);
  if (!bytes) return at::empty(desc.dims, dtype);
  if (desc.placement) return at::from_blob(buffer.data, desc.dims, dtype).clone();
  require(is_device(buffer.data), what, " is not in device memory");
  const auto held = at::from_blob(to_kernel(buffer.data, bytes), stored, dtype);
  if (!fractal) return held;
  fractals.push_back({held, at::empty(desc.dims, dtype)});
  return fractals.back().matrix;
}

Computation prepare(GraphOperator& op, const GraphCall& call) {
  GraphReader reader(call, op.info.parameters);
  ParameterValues<GraphParameterType> values(op.parameters);
  values.make([&](const GraphParameterType& type, void* at, size_t) { type.take(reader, at); });
  reader.finish();
  aclOpExecutor executor;
  ArgumentReader rules(op.info, executor);
  for (size_t i = 0; i < op.parameters.count; ++i) op.parameters.types[i]->note(rules, values[i]);
  rules.check_rules();
  auto computation = values.call(op.body);
  call.attributes.all_read();
  return computation;
}

int execute(const char* op_type, int inputs, const void* const input[], const void* const from[],
    int outputs, const void* const output[], void* const to[], const void* attributes,
    void* stream) {
  const auto found = op_type ? table().find(op_type) : table().end();
  if (found == table().end()) return refuse_aclop(op_type);
  auto& op = *found->second;
  auto task = std::make_unique<aclOpExecutor>();
  const auto take = [&] {
    c10::InferenceMode off(false);  // as in aclCreateTensor
    GraphCall call;
    std::vector<Fractal> packed;
    for (int i = 0; i < inputs; ++i) {
      call.inputs.push_back(tensor_of(input[i], from[i], text("input ", i), task->fractals));
      call.on_host.push_back(desc_of(input[i]).placement != 0);
      if (!call.on_host.back()) task->tensors.push_back(call.inputs.back());
    }
    for (int i = 0; i < outputs; ++i) {
      call.outputs.push_back(tensor_of(output[i], to[i], text("output ", i), packed));
      task->tensors.push_back(call.outputs.back());
    }
    if (attributes) call.attributes = Attributes(*static_cast<const Values*>(attributes));
    for (size_t i = 0; i < task->tensors.size(); ++i)
      check_dtypes(task->tensors, i, i + 1, 0, op.info.parameters, static_cast<int>(i));
    task->compute = [compute = std::make_shared<Computation>(prepare(op, call)), packed,
                        entry = op.info.name] {
      (*compute)();
      for (const auto& each : packed) each.pack();
      note(entry);
    };
    if (fault::armed()) task->hangs = fault::pending() == fault::Kind::hang;
  };
  const int status = intercepted(op.info.name, take, op.type);
  return status ? operator_done(op.type, status)
                : launch(op.type, hand_out(std::move(task)), stream);
}
}  // namespace

namespace emu {

GraphRegistration::GraphRegistration(GraphOperator& op, const char* file) {
  const Registration registration(op.info.name, computed, file);
  table().emplace(op.type, &op);
}

const Attribute* Attributes::find(const char* name) const {
  read_->insert(name);
  if (!values_) return nullptr;
  const auto found = values_->find(name);
  return found == values_->end() ? nullptr : &found->second;
}

// Those of torch_npu's own begin with an underscore: the engine that runs the operator
// (OpCommandImpl::SetEnginePriority).
void Attributes::all_read() const {
  if (!values_) return;
  for (const auto& [name, value] : *values_)
    require(name[0] == '_' || read_->count(name), "attribute ", name, " is not computed");
}

Tensor GraphReader::input(const std::string& name) {
  require(input_ < call_.inputs.size() && call_.inputs[input_].defined(), "input ", name,
      " is missing");
  return call_.inputs[input_++];
}

Tensor GraphReader::on_host(const std::string& name) {
  const auto value = input(name);
  require(
      call_.on_host[input_ - 1], "input ", name, " is in device memory; computed: in host memory");
  return value;
}

Tensor GraphReader::output(const std::string& name) {
  require(output_ < call_.outputs.size() && call_.outputs[output_].defined(), "output ", name,
      " is missing");
  return call_.outputs[output_++];
}

void GraphReader::finish() const {
  require(input_ >= call_.inputs.size() && output_ == call_.outputs.size(), "the call has ",
      call_.inputs.size(), " inputs and ", call_.outputs.size(), " outputs; the operator is ",
      parameters_);
}

}  // namespace emu

// Compile options of graph operators are kept; unset ones read "disable", except jit-compile on the
// first chips.
namespace {
std::mutex options_mutex;
std::map<int32_t, std::string> options;
}  // namespace
std::string emu::compile_option(int32_t option) {
  std::lock_guard lock(options_mutex);
  const auto found = options.find(option);
  return found != options.end()                           ? found->second
         : option == kJitCompile && compiles_by_default() ? "enable"
                                                          : "disable";
}
namespace {
// On the modelled clock, the chips that compile by default say that they do not: torch_npu then
// uses aclnn operators, which are all computed, and launch() has a compilation for each new shape.
std::string answered(int32_t option) {
  std::unique_lock lock(options_mutex);
  if (option == kJitCompile && !options.count(option) && shows_modelled_time()) return "disable";
  lock.unlock();
  return compile_option(option);
}
}  // namespace
ACL_API(keeps, aclSetCompileopt, (int32_t option, const char* value), {
  check(value != nullptr, kInvalidParam, "value is null");
  std::lock_guard lock(options_mutex);
  options[option] = value;
})
bool emu::compiles_at_run_time() { return compile_option(kJitCompile) == "enable"; }
ACL_VALUE(size_t, answers, aclGetCompileoptSize, (int32_t option),
    { return answered(option).size() + 1; })
ACL_API(answers, aclGetCompileopt, (int32_t option, char* value, size_t length), {
  const auto found = answered(option);
  check(length > found.size(), kInvalidParam, "no room for the value, '", found, "'");
  std::strcpy(value, found.c_str());
})

REGISTER(computed, aclopCompileAndExecute, "the table of GRAPH_OP")
EXPORT int aclopCompileAndExecute(const char* op_type, int inputs, const void* const input[],
    const void* const from[], int outputs, const void* const output[], void* const to[],
    const void* attributes, int, int, const char*, void* stream) {
  note("aclopCompileAndExecute");
  if (op_type && std::strcmp(op_type, "Identity") == 0 &&
      changes_nothing(*input, *output, *from, *to)) {
    return copy_bytes(buffer_of(*from), buffer_of(*to), stream);
  }
  return execute(op_type, inputs, input, from, outputs, output, to, attributes, stream);
}
// Also tells the outputs' shapes, which are those of the descriptions for the computed operators.
REGISTER(computed, aclopCompileAndExecuteV2, "the table of GRAPH_OP")
EXPORT int aclopCompileAndExecuteV2(const char* op_type, int inputs, const void* const input[],
    const void* const from[], int outputs, const void* const output[], void* const to[],
    const void* attributes, int, int, const char*, void* stream) {
  note("aclopCompileAndExecuteV2");
  return execute(op_type, inputs, input, from, outputs, output, to, attributes, stream);
}

#define IGNORE(NAME, WHY) ACL_API(nothing(WHY), NAME, (), {})

ACL_VALUE(void*, keeps, aclopCreateAttr, (), { return new Values; })
ACL_VALUE(void, keeps, aclopDestroyAttr, (const void* object),
    { delete static_cast<const Values*>(object); })
ACL_API(keeps, aclDestroyDataBuffer, (const void* buffer), { delete &buffer_of(buffer); })
ACL_VALUE(void*, keeps, aclCreateDataBuffer, (void* data, size_t bytes),
    { return new DataBuffer{data, bytes}; })
ACL_VALUE(void*, keeps, aclCreateTensorDesc,
    (int32_t type, int32_t rank, const int64_t* dims, int32_t format),
    { return new TensorDesc{type, format, {dims, dims + (dims ? rank : 0)}}; })
ACL_VALUE(void, keeps, aclDestroyTensorDesc, (const void* desc), { delete &desc_of(desc); })
// Of no description: ACL_DT_UNDEFINED, ACL_FORMAT_UNDEFINED and 0.
ACL_VALUE(int32_t, answers, aclGetTensorDescType, (const void* desc),
    { return desc ? desc_of(desc).type : -1; })
ACL_VALUE(int32_t, answers, aclGetTensorDescFormat, (const void* desc),
    { return desc ? desc_of(desc).format : -1; })
ACL_VALUE(size_t, answers, aclGetTensorDescNumDims, (const void* desc),
    { return desc ? desc_of(desc).dims.size() : 0; })
ACL_API(answers, aclGetTensorDescDimV2, (const void* desc, size_t index, int64_t* size), {
  check(desc != nullptr, kInvalidParam, "desc is null");
  const auto& dims = desc_of(desc).dims;
  check(index < dims.size(), kInvalidParam, "dimension ", index, " of ", dims.size());
  *size = dims[index];
})
ACL_API(keeps, aclSetTensorFormat, (void* desc, int32_t format), {
  check(desc != nullptr, kInvalidParam, "desc is null");
  static_cast<TensorDesc*>(desc)->storage_format = format;
})
ACL_API(keeps, aclSetTensorPlaceMent, (void* desc, int32_t memory), {
  check(desc != nullptr, kInvalidParam, "desc is null");
  static_cast<TensorDesc*>(desc)->placement = memory;
})
IGNORE(aclSetTensorDescName, "names are for the graph's dump")
ACL_API(keeps, aclSetTensorShape, (void* desc, int rank, const int64_t* dims), {
  check(desc != nullptr, kInvalidParam, "desc is null");
  static_cast<TensorDesc*>(desc)->storage_dims.assign(dims, dims + (dims ? rank : 0));
})

#define SET_ATTR(NAME, PARAMS, ...)                                                         \
  ACL_API(keeps, aclopSetAttr##NAME, PARAMS, {                                              \
    check(attributes != nullptr && name != nullptr, kInvalidParam, "attr or name is null"); \
    (*static_cast<Values*>(attributes))[name] = Attribute(__VA_ARGS__);                     \
  })
SET_ATTR(Bool, (void* attributes, const char* name, uint8_t value), value != 0)
SET_ATTR(Int, (void* attributes, const char* name, int64_t value), value)
SET_ATTR(Float, (void* attributes, const char* name, float value), value)
SET_ATTR(String, (void* attributes, const char* name, const char* value), Text(value ? value : ""))
SET_ATTR(DataType, (void* attributes, const char* name, int32_t value), int64_t{value})
SET_ATTR(ListBool, (void* attributes, const char* name, int count, const uint8_t* values),
    Bools(values, values + count))
SET_ATTR(ListInt, (void* attributes, const char* name, int count, const int64_t* values),
    Ints(values, values + count))
SET_ATTR(ListFloat, (void* attributes, const char* name, int count, const float* values),
    Floats(values, values + count))
ACL_API(keeps, aclopSetAttrListListInt,
    (void* attributes, const char* name, int count, const int* counts,
        const int64_t* const values[]),
    {
      check(attributes != nullptr && name != nullptr, kInvalidParam, "attr or name is null");
      std::vector<Ints> lists;
      for (int i = 0; i < count; ++i) lists.emplace_back(values[i], values[i] + counts[i]);
      (*static_cast<Values*>(attributes))[name] = std::move(lists);
    })
