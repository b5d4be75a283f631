// The legacy graph-operator path. torch_npu takes it when an operator's jit-compilation is on or its aclnn symbol is missing; here the
// first is reported as off, the second cannot be, and executing one always refuses by the operator's name. What torch_npu builds
// beforehand (descriptions, attributes, buffers) is bookkeeping; of it, torch_npu reads the descriptions, to log them after the refusal.
// Call sites: torch_npu/csrc/framework/OpParamMaker.cpp (BSD).
#include <cstring>
#include <vector>

#include "../core/registry.h"

using namespace emu;

namespace {
struct Opaque {};

int refuse_aclop(const char* op_type) {
  return operator_done(op_type, fail(kUnsupported, text("the legacy graph operator '", op_type, "' (aclopCompileAndExecute) is never emulated; "
                                 "torch_npu reaches it only where it has no aclnn operator for this call")));
}
}  // namespace

// Compile options: jit-compile (ACL_OP_JIT_COMPILE) reads "disable"; so does everything else that is asked for.
ACL_API(bookkeeping, aclSetCompileopt, (int32_t, const char*), {})
EXPORT size_t aclGetCompileoptSize(int32_t) { return sizeof("disable"); }
static const Registration registration_aclGetCompileoptSize{"aclGetCompileoptSize", State::bookkeeping, __FILE__};
ACL_API(bookkeeping, aclGetCompileopt, (int32_t, char* value, size_t length), {
  check(length >= sizeof("disable"), kInvalidParam, "no room for the value");
  std::strcpy(value, "disable");
})

EXPORT int aclopCompileAndExecute(const char* op_type, ...) { return refuse_aclop(op_type); }
EXPORT int aclopCompileAndExecuteV2(const char* op_type, ...) { return refuse_aclop(op_type); }

#define MAKE(NAME)                                                                  \
  static const Registration registration_##NAME{#NAME, State::bookkeeping, __FILE__}; \
  EXPORT void* NAME() { return new Opaque; }
#define DROP(NAME)                                                                  \
  static const Registration registration_##NAME{#NAME, State::bookkeeping, __FILE__}; \
  EXPORT void NAME(const void* object) { delete static_cast<const Opaque*>(object); }
#define IGNORE(NAME) ACL_API(bookkeeping, NAME, (), {})

MAKE(aclopCreateAttr)
DROP(aclopDestroyAttr)
MAKE(aclCreateDataBuffer)
ACL_API(bookkeeping, aclDestroyDataBuffer, (const void* buffer), { delete static_cast<const Opaque*>(buffer); })

namespace {
struct TensorDesc {
  int32_t type, format;
  std::vector<int64_t> dims;
};
const TensorDesc& desc_of(const void* desc) { return *static_cast<const TensorDesc*>(desc); }
}  // namespace
#define DESC(TYPE, NAME, PARAMS, ...)                                                         \
  static const Registration registration_##NAME{#NAME, State::bookkeeping, __FILE__}; \
  EXPORT TYPE NAME PARAMS __VA_ARGS__
DESC(void*, aclCreateTensorDesc, (int32_t type, int32_t rank, const int64_t* dims, int32_t format), {
  return new TensorDesc{type, format, {dims, dims + rank}};
})
DESC(void, aclDestroyTensorDesc, (const void* desc), { delete static_cast<const TensorDesc*>(desc); })
DESC(int32_t, aclGetTensorDescType, (const void* desc), { return desc_of(desc).type; })
DESC(int32_t, aclGetTensorDescFormat, (const void* desc), { return desc_of(desc).format; })
DESC(size_t, aclGetTensorDescNumDims, (const void* desc), { return desc_of(desc).dims.size(); })
ACL_API(bookkeeping, aclGetTensorDescDimV2, (const void* desc, size_t index, int64_t* size), {
  const auto& dims = desc_of(desc).dims;
  check(index < dims.size(), kInvalidParam, "dimension ", index, " of ", dims.size());
  *size = dims[index];
})
IGNORE(aclSetTensorDescName)
IGNORE(aclSetTensorFormat)
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
