// Legacy graph operators (aclop). torch_npu uses them if jit-compilation is on or an aclnn symbol is missing; the emulator
// reports jit-compilation as off and defines all aclnn symbols, and executing a graph operator fails with its name. Exception: an
// Identity from a format to itself, which npu_format_cast(x, 3) executes when internal formats are off, the default (torch_npu's
// FormatCastKernelNpu.cpp). Descriptions, attributes and buffers are bookkeeping. Call sites:
// torch_npu/csrc/framework/OpParamMaker.cpp (BSD).
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/device.h"
#include "op.h"

using namespace emu;

namespace {
struct Opaque {};
struct TensorDesc {
  int32_t type, format;
  std::vector<int64_t> dims;
  int32_t storage_format = format;
};
struct DataBuffer {
  void* data;
  size_t bytes;
};
const TensorDesc& desc_of(const void* desc) { return *static_cast<const TensorDesc*>(desc); }
const DataBuffer& buffer_of(const void* buffer) { return *static_cast<const DataBuffer*>(buffer); }

int refuse_aclop(const char* op_type) {
  if (!op_type) op_type = "(null)";
  return operator_done(
      op_type, fail(kUnsupported, text("the legacy graph operator '", op_type,
                                      "' (aclopCompileAndExecute) is never emulated; "
                                      "torch_npu reaches it only where it has no aclnn operator for this call")));
}

bool changes_nothing(const void* input, const void* output, const void* from, const void* to) {
  return desc_of(input).type == desc_of(output).type && desc_of(input).storage_format == desc_of(output).storage_format &&
         buffer_of(from).bytes == buffer_of(to).bytes;
}

int copy_bytes(const DataBuffer& from, const DataBuffer& to, void* stream) {
  return guarded("Identity", [&] {
    auto task = std::make_unique<aclOpExecutor>();
    if (const auto bytes = static_cast<int64_t>(to.bytes)) {
      task->tensors = {
          at::from_blob(to_kernel(from.data), bytes, at::kByte), at::from_blob(to_kernel(to.data), bytes, at::kByte)};
      task->compute = [tensors = task->tensors] { tensors[1].copy_(tensors[0]); };
    } else {
      task->compute = [] {};
    }
    check(launch("Identity", task.release(), stream) == kOk, kOpFailed, "the copy failed");
  });
}
}  // namespace

// Compile options of graph operators are kept; unset ones, such as jit-compile (ACL_OP_JIT_COMPILE), read "disable".
namespace {
std::mutex options_mutex;
std::map<int32_t, std::string> options;
std::string option_of(int32_t option) {
  std::lock_guard lock(options_mutex);
  const auto found = options.find(option);
  return found == options.end() ? "disable" : found->second;
}
}  // namespace
ACL_API(keeps, aclSetCompileopt, (int32_t option, const char* value), {
  check(value != nullptr, kInvalidParam, "value is null");
  std::lock_guard lock(options_mutex);
  options[option] = value;
})
ACL_VALUE(size_t, answers, aclGetCompileoptSize, (int32_t option), { return option_of(option).size() + 1; })
ACL_API(answers, aclGetCompileopt, (int32_t option, char* value, size_t length), {
  const auto found = option_of(option);
  check(length > found.size(), kInvalidParam, "no room for the value, '", found, "'");
  std::strcpy(value, found.c_str());
})

EXPORT int aclopCompileAndExecute(const char* op_type, int, const void* const input[], const void* const from[], int,
    const void* const output[], void* const to[], const void*, int, int, const char*, void* stream) {
  if (op_type && std::strcmp(op_type, "Identity") == 0 && changes_nothing(*input, *output, *from, *to)) {
    return copy_bytes(buffer_of(*from), buffer_of(*to), stream);
  }
  return refuse_aclop(op_type);
}
EXPORT int aclopCompileAndExecuteV2(const char* op_type, ...) { return refuse_aclop(op_type); }

#define IGNORE(NAME) ACL_API(nothing("a graph operator's, which is never emulated"), NAME, (), {})

ACL_VALUE(void*, keeps, aclopCreateAttr, (), { return new Opaque; })
ACL_VALUE(void, keeps, aclopDestroyAttr, (const void* object), { delete static_cast<const Opaque*>(object); })
ACL_API(keeps, aclDestroyDataBuffer, (const void* buffer), { delete &buffer_of(buffer); })
ACL_VALUE(void*, keeps, aclCreateDataBuffer, (void* data, size_t bytes), { return new DataBuffer{data, bytes}; })
ACL_VALUE(void*, keeps, aclCreateTensorDesc, (int32_t type, int32_t rank, const int64_t* dims, int32_t format),
    { return new TensorDesc{type, format, {dims, dims + (dims ? rank : 0)}}; })
ACL_VALUE(void, keeps, aclDestroyTensorDesc, (const void* desc), { delete &desc_of(desc); })
// Of no description: ACL_DT_UNDEFINED, ACL_FORMAT_UNDEFINED and 0.
ACL_VALUE(int32_t, answers, aclGetTensorDescType, (const void* desc), { return desc ? desc_of(desc).type : -1; })
ACL_VALUE(int32_t, answers, aclGetTensorDescFormat, (const void* desc), { return desc ? desc_of(desc).format : -1; })
ACL_VALUE(size_t, answers, aclGetTensorDescNumDims, (const void* desc), { return desc ? desc_of(desc).dims.size() : 0; })
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
IGNORE(aclSetTensorDescName)
IGNORE(aclSetTensorPlaceMent)
IGNORE(aclSetTensorShape)
IGNORE(aclopSetAttrBool)
IGNORE(aclopSetAttrDataType)
IGNORE(aclopSetAttrFloat)
IGNORE(aclopSetAttrInt)
IGNORE(aclopSetAttrListBool)
IGNORE(aclopSetAttrListFloat)
IGNORE(aclopSetAttrListInt)
IGNORE(aclopSetAttrListListInt)
IGNORE(aclopSetAttrString)
