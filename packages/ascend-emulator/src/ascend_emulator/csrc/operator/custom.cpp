// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators of the user's own, in C++ or in Python: the functions of
// include/ascend_emulator/operator.h.
#define ASCEND_EMULATOR_NO_ATEN
#include "include/ascend_emulator/operator.h"

#include <dlfcn.h>

#include <cmath>
#include <map>
#include <mutex>

#include "core/host_wait.h"
#include "op.h"

namespace emu::custom {
namespace {

// ascend_emulator.operators' function: computes `function` of the arguments in `values` (JSON; a
// tensor is its index, in a list).
using Python = int (*)(const char* function, const char* values,
    const AscendEmulatorTensor* tensors, int count, char* message, int size);
std::atomic<Python> python{nullptr};

int32_t acl_type(at::ScalarType type) {
  for (const int32_t code :
      {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 16, 17, 27, 33, 34, 35, 36, 37, 40, 41})
    if (to_scalar_type(code) == type) return code;
  raise(kOpParam, {"dtype ", type, " has no aclDataType"});
}

// Names outlive their library's strings; a replayed graph and a trace refer to them.
OperatorInfo& info_of(const char* name, const char* parameters) {
  static std::mutex mutex;
  static auto* const all =
      new std::map<std::string, std::pair<std::string, std::unique_ptr<OperatorInfo>>>;
  std::lock_guard lock(mutex);
  auto& [names, info] = (*all)[name];
  if (!info) {
    names = parameters;
    info.reset(new OperatorInfo{all->find(name)->first.c_str(), names.c_str(), false});
  }
  return *info;
}

struct Custom {
  AscendEmulatorCompute compute;
  void* context;
  AscendEmulatorRelease release;
  std::vector<at::Tensor> held{};
  std::vector<AscendEmulatorTensor> tensors{};

  Custom(AscendEmulatorCompute compute, void* context, AscendEmulatorRelease release)
      : compute(compute), context(context), release(release) {}
  Custom(const Custom&) = delete;
  ~Custom() {
    if (release) release(context);
  }

  void take(const std::vector<at::Tensor>& given) {
    held = given;
    for (const auto& each : held) {
      if (each.defined())
        tensors.push_back({each.data_ptr(), each.sizes().data(), each.strides().data(),
            static_cast<int32_t>(each.dim()), acl_type(each.scalar_type())});
      else tensors.push_back({});
    }
  }
  void run() const {
    char message[1024] = "";
    if (compute(context, tensors.data(), static_cast<int>(tensors.size()), message,
            sizeof message) != 0)
      throw Error(kOpFailed, message, true);
  }
};

void take(ArgumentReader& reader, const AscendEmulatorArgument& argument) {
  const auto* tensor = static_cast<const aclTensor*>(argument.object);
  switch (argument.kind) {
    case kAscendEmulatorTensor: reader.take<Tensor>(tensor); return;
    case kAscendEmulatorOptionalTensor: reader.take<Opt<Tensor>>(tensor); return;
    case kAscendEmulatorTensors:
      reader.take<Tensors>(static_cast<const aclTensorList*>(argument.object));
      return;
    default: reader.take<int64_t>(argument.integer); return;  // keeps the position of the others
  }
}

std::string quoted(const char* value) {
  std::ostringstream out;
  out << '"';
  for (const char* at = value; *at; ++at) {
    if (*at == '"' || *at == '\\') out << '\\';
    if (static_cast<unsigned char>(*at) < 0x20)
      out << "\\u00" << "0123456789abcdef"[*at >> 4 & 15] << "0123456789abcdef"[*at & 15];
    else out << *at;
  }
  return out.str() + '"';
}

// As Python's json reads it.
std::string text_of(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.17g", value);
  return std::string_view(digits).find_first_of(".e") == std::string_view::npos ? text(digits, ".0")
                                                                                : digits;
}

template <class Object, class Write> std::string list(const void* object, Write&& write) {
  if (!object) return "null";
  std::string out = "[";
  for (const auto& each : static_cast<const Object*>(object)->value)
    out += text(out.size() > 1 ? ", " : "", write(each));
  return out + "]";
}

std::string scalar(const aclScalar* given) {
  required(given);
  const auto& value = given->value;
  require(!value.isComplex(), "a complex scalar is not passed to operators in Python");
  return value.isBoolean()         ? (value.toBool() ? "true" : "false")
         : value.isFloatingPoint() ? text_of(value.toDouble())
                                   : std::to_string(value.toLong());
}

// The arguments as JSON; tensors are {"tensor": index} or {"tensors": [index, number]}.
std::string json(const AscendEmulatorArgument* arguments, int count) {
  std::string out = "[";
  int64_t tensors = 0;
  const auto whole = [](int64_t each) { return std::to_string(each); };
  for (int i = 0; i < count; ++i) {
    const auto& [kind, object, integer, real] = arguments[i];
    if (i) out += ", ";
    switch (kind) {
      case kAscendEmulatorTensor:
      case kAscendEmulatorOptionalTensor: out += text("{\"tensor\": ", tensors++, "}"); break;
      case kAscendEmulatorTensors: {
        required(object);
        const auto size =
            static_cast<int64_t>(static_cast<const aclTensorList*>(object)->items.size());
        out += text("{\"tensors\": [", tensors, ", ", size, "]}");
        tensors += size;
        break;
      }
      case kAscendEmulatorScalar: out += scalar(static_cast<const aclScalar*>(object)); break;
      case kAscendEmulatorInts: out += list<aclIntArray>(object, whole); break;
      case kAscendEmulatorFloats: out += list<aclFloatArray>(object, text_of); break;
      case kAscendEmulatorBools:
        out += list<aclBoolArray>(object, [](bool each) { return each ? "true" : "false"; });
        break;
      case kAscendEmulatorText:
        out += object ? quoted(static_cast<const char*>(object)) : "null";
        break;
      case kAscendEmulatorReal: out += text_of(real); break;
      case kAscendEmulatorBoolean: out += integer ? "true" : "false"; break;
      default: out += whole(integer);
    }
  }
  return out + "]";
}

// Imports ascend_emulator.operators in this process's Python, once.
Python interpreter() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
    const auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
    const auto run =
        reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
    if (!ensure || !release || !run) return;
    const int state = ensure();
    run("import ascend_emulator.operators; ascend_emulator.operators.register()");
    release(state);
    HostWait::release_python();
  });
  return python;
}

struct PythonCall {
  std::string function, values;
};

int run_python(
    void* context, const AscendEmulatorTensor* tensors, int count, char* message, int size) {
  const auto& call = *static_cast<const PythonCall*>(context);
  return python.load()(call.function.c_str(), call.values.c_str(), tensors, count, message, size);
}

}  // namespace
}  // namespace emu::custom

using namespace emu;

EXPORT int ascend_emulator_prepare(const char* name, const char* parameters,
    const AscendEmulatorArgument* arguments, int count, AscendEmulatorCompute compute,
    void* context, AscendEmulatorRelease release, uint64_t* workspace, void** executor) {
  const auto call = std::make_shared<custom::Custom>(compute, context, release);
  return prepare(
      custom::info_of(name, parameters),
      [&](ArgumentReader& reader) -> Computation {
        for (int i = 0; i < count; ++i) custom::take(reader, arguments[i]);
        reader.check();
        call->take(reader.tensors());
        return [call] { call->run(); };
      },
      workspace, reinterpret_cast<aclOpExecutor**>(executor));
}

EXPORT int ascend_emulator_prepare_python(const char* name, const char* parameters,
    const AscendEmulatorArgument* arguments, int count, const char* function, uint64_t* workspace,
    void** executor) {
  std::unique_ptr<custom::PythonCall> call;
  const int status = guarded(name, [&] {
    check(custom::interpreter() != nullptr, kUnsupported, "its emulation, ", function,
        ", is in Python, and this process has no interpreter with ascend_emulator");
    call.reset(new custom::PythonCall{function, custom::json(arguments, count)});
  });
  if (status != kOk) return operator_done(name, status);
  return ascend_emulator_prepare(
      name, parameters, arguments, count, &custom::run_python, call.release(),
      [](void* held) { delete static_cast<custom::PythonCall*>(held); }, workspace, executor);
}

EXPORT int ascend_emulator_launch(const char* name, void* executor, void* stream) {
  if (!executor) return launch(name, nullptr, stream);
  return launch(custom::info_of(name, "").name, static_cast<aclOpExecutor*>(executor), stream);
}

EXPORT int ascend_emulator_fail(const char* name, const char* message) {
  return operator_done(name, fail(kOpParam, text(name, ": ", message)));
}

EXPORT int64_t ascend_emulator_values(
    AscendEmulatorKind kind, const void* object, void* values, int64_t most) {
  if (!object) return -1;
  const auto read = [&](const auto& all, auto* into) {
    for (size_t i = 0; i < all.size() && static_cast<int64_t>(i) < most; ++i) into[i] = all[i];
    return static_cast<int64_t>(all.size());
  };
  switch (kind) {
    case kAscendEmulatorTensors:
      return static_cast<int64_t>(static_cast<const aclTensorList*>(object)->items.size());
    case kAscendEmulatorInts:
      return read(static_cast<const aclIntArray*>(object)->value, static_cast<int64_t*>(values));
    case kAscendEmulatorFloats:
      return read(static_cast<const aclFloatArray*>(object)->value, static_cast<float*>(values));
    case kAscendEmulatorBools:
      return read(static_cast<const aclBoolArray*>(object)->value, static_cast<uint8_t*>(values));
    default: return -1;
  }
}

EXPORT int ascend_emulator_scalar(const void* object, double* real, int64_t* integer) {
  if (!object) return -1;
  const auto& value = static_cast<const aclScalar*>(object)->value;
  if (value.isComplex()) return -1;
  if (value.isFloatingPoint()) return *real = value.toDouble(), 0;
  *integer = value.isBoolean() ? value.toBool() : value.toLong();
  return value.isBoolean() ? 2 : 1;
}

// For ascend_emulator.operators.
EXPORT void ascend_emulator_set_python(
    int (*call)(const char*, const char*, const AscendEmulatorTensor*, int, char*, int)) {
  custom::python = call;
}
