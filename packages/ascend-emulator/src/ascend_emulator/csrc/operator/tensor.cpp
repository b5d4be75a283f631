// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "tensor.h"

#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/strides.h>

#include <mutex>
#include <unordered_map>

#include "core/device.h"
#include "core/entry_point.h"
#include "core/refusal.h"
#include "checks.h"

namespace emu {

at::ScalarType to_scalar_type(int32_t acl_type) {
  switch (acl_type) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 7: return at::kUInt16;
    case 8: return at::kUInt32;
    case 9: return at::kLong;
    case 10: return at::kUInt64;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
    case 33: return at::kComplexHalf;
    case 34: return at::kBits8;  // HiF8, which PyTorch does not have
    case 35: return at::kFloat8_e5m2;
    case 36: return at::kFloat8_e4m3fn;
    case 37: return at::kFloat8_e8m0fnu;
    case 40: return at::kFloat4_e2m1fn_x2;
    case 41: return at::kBits4x2;  // e1m2, two in a byte
  }
  raise(kOpParam, {"aclDataType ", acl_type, " is not emulated"}, /*own=*/true);
}

namespace {

at::Scalar read_scalar(const void* at, at::ScalarType type) {
  switch (type) {
#define READ(NAME) \
  case at::NAME:   \
    return at::Scalar(*static_cast<const c10::impl::ScalarTypeToCPPTypeT<at::NAME>*>(at));
    READ(kBool)
    READ(kByte)
    READ(kChar)
    READ(kShort)
    READ(kInt)
    READ(kLong)
    READ(kUInt16)
    READ(kUInt32)
    READ(kUInt64)
    READ(kHalf)
    READ(kBFloat16)
    READ(kFloat)
    READ(kDouble)
    READ(kComplexHalf)
    READ(kComplexFloat)
    READ(kComplexDouble)
#undef READ
    default: raise(kOpParam, {"a scalar of dtype ", type, " is not emulated"}, /*own=*/true);
  }
}

// Sizes and strides in bytes of a tensor whose elements have four bits: torch_npu gives those of
// the elements (CollectB4ShapeInfo of op-plugin's op_api_common.cpp), of which two in the
// contiguous dimension are a byte.
struct Bytes {
  std::vector<int64_t> sizes, strides;

  Bytes(at::IntArrayRef given, at::IntArrayRef steps, int64_t offset, bool fractal)
      : sizes(given.vec()), strides(steps.vec()) {
    require_emulated(!fractal, "a tensor of four-bit values in FRACTAL_NZ is not emulated");
    require_emulated(offset == 0, "a tensor of four-bit values at offset ", offset,
        " of its storage is not emulated: torch_npu counts bytes there");
    require(!sizes.empty(), "a tensor of four-bit values has no dimensions");
    const size_t last = sizes.size() - 1;
    const auto fits = [&](size_t dim) {
      for (size_t i = 0; i < strides.size(); ++i)
        if (i != dim && sizes[i] > 1 && strides[i] % 2) return false;
      return strides[dim] == 1 && sizes[dim] % 2 == 0;
    };
    const size_t packed = last && !fits(last) ? last - 1 : last;
    require(fits(packed), "a tensor of four-bit values has shape ", given, " and strides ", steps,
        "; the last or last but one dimension must be contiguous and even");
    sizes[packed] /= 2;
    for (size_t i = 0; i < strides.size(); ++i)
      if (i != packed) strides[i] = std::max<int64_t>(strides[i] / 2, 1);
  }
};

template <class Make> auto created(const char* name, Make&& make) -> decltype(make()) {
  decltype(make()) object = nullptr;
  guarded(name, [&] {
    try {
      object = make();
    } catch (const std::exception& e) {
      creation_error.emplace(kOpParam, e.what(), error_of(e).classed);
      throw;
    }
  });
  return object;
}

// Tensors in host memory that devices cannot access, with the error. ATB's operators read sequence
// lengths from them (ops/atb/atb.h); all other operators refuse them.
std::mutex host_mutex;
std::unordered_map<const void*, std::string> host_tensors;
std::atomic<bool> any_host_tensor{false};

std::optional<std::string> of_host(const void* object, bool forget = false) {
  if (!any_host_tensor) return std::nullopt;
  std::lock_guard lock(host_mutex);
  const auto found = host_tensors.find(object);
  if (found == host_tensors.end()) return std::nullopt;
  auto reason = found->second;
  if (forget) host_tensors.erase(found);
  return reason;
}

void destroy(const aclTensor* tensor) {
  of_host(tensor, true);
  delete tensor;
}

}  // namespace

namespace transformer {
at::Tensor host_values(const aclTensor* tensor);
at::Tensor host_values(const aclTensor* tensor) {
  if (of_host(tensor)) return tensor->value.clone();
  return given(tensor) ? tensor->value : at::Tensor();
}
}  // namespace transformer

bool given(const void* object) {
  if (object) {
    if (const auto reason = of_host(object)) throw Error(kOpParam, *reason);
    return true;
  }
  if (!creation_error) return false;
  throw *std::exchange(creation_error, std::nullopt);
}

at::Tensor matrix_of(const std::string& name, const aclTensor& tensor) {
  const auto& view = tensor.value;
  const auto stored = tensor.storage.sizes();
  const size_t batch = stored.size() - 4;
  const int64_t c0 = stored.back(), columns = stored[batch] * c0, rows = stored[batch + 1] * 16;
  c10::InferenceMode off(false);                         // as in aclCreateTensor
  if (view.sizes() == stored && view.is_contiguous()) {  // in the dimensions of its storage
                                                         // (npu_grouped_matmul_swiglu_quant_v2)
    auto sizes = stored.slice(0, batch).vec();
    sizes.insert(sizes.end(), {rows, columns});
    return at::empty(sizes, view.options());
  }
  const auto whole = [&](const at::Tensor& matrix) {
    const auto sizes = matrix.sizes();
    return matrix.is_contiguous() && sizes.size() == batch + 2 &&
           sizes.slice(0, batch) == stored.slice(0, batch) &&
           (sizes[batch] + 15) / 16 * 16 == rows &&
           (sizes[batch + 1] + c0 - 1) / c0 * c0 == columns;
  };
  // "aclnnMatmulWeightNz" of CANN's API reference: the storage's dimensions follow from k and n,
  // not transposed or transposed.
  if (tensor.offset == 0 && view.dim() >= 2) {
    if (whole(view)) return at::empty(view.sizes(), view.options());
    if (const auto base = view.transpose(-1, -2); whole(base))
      return at::empty(base.sizes(), view.options()).transpose(-1, -2);
  }
  raise(kOpParam, {name, " has shape ", view.sizes(), ", strides ", view.strides(), " and offset ",
                      tensor.offset, " in storage ", stored,
                      " of FRACTAL_NZ; only the whole matrix or its transpose can be read there"});
}

namespace {
// [..., k / 16, 16, n / c0, c0] of the storage, in the order of a matrix.
at::Tensor rows_of_fractal(const at::Tensor& storage) { return storage.movedim(-4, -2); }
}  // namespace

void Fractal::unpack() const {
  const auto base = matrix.is_contiguous() ? matrix : matrix.transpose(-1, -2);
  const auto padded = rows_of_fractal(storage).flatten(-2).flatten(-3, -2);
  at::Tensor(base).copy_(padded.narrow(-2, 0, base.size(-2)).narrow(-1, 0, base.size(-1)));
}

void Fractal::pack() const {
  const auto into = rows_of_fractal(storage);
  const auto rows = into.size(-4) * into.size(-3), columns = into.size(-2) * into.size(-1);
  const auto padded =
      at::constant_pad_nd(matrix, {0, columns - matrix.size(-1), 0, rows - matrix.size(-2)});
  into.copy_(padded.unflatten(-1, {into.size(-2), into.size(-1)})
          .unflatten(-3, {into.size(-4), into.size(-3)}));
}

void required(const void* object) { require(given(object), "a required argument is null"); }

void put_rows(const at::Tensor& out, at::TensorList indices, const at::Tensor& rows) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& each : indices) list.push_back(each);
  out.index_put_(list, rows);
}

}  // namespace emu

#define CREATE(TYPE, NAME, PARAMS, ...) \
  ACL_VALUE(TYPE*, keeps, NAME, PARAMS, { return emu::created(#NAME, [&] __VA_ARGS__); })

#define DESTROY(TYPE, NAME) ACL_API(keeps, NAME, (const TYPE* object), { delete object; })

CREATE(aclTensor, aclCreateTensor,
    (const int64_t* dims, uint64_t rank, int32_t type, const int64_t* strides, int64_t offset,
        int32_t format, const int64_t* storage_dims, uint64_t storage_rank, void* data),
    {
      // torch_npu's queue thread writes to these tensors outside inference mode, which inference
      // tensors do not allow.
      c10::InferenceMode off(false);
      const auto dtype = emu::to_scalar_type(type);
      auto sizes = at::IntArrayRef(dims, rank), steps = at::IntArrayRef(strides, rank);
      std::optional<emu::Bytes> bytes;
      if (dtype == at::kFloat4_e2m1fn_x2 || dtype == at::kBits4x2) {
        bytes.emplace(sizes, steps, offset, format == emu::kFractalNZ);
        sizes = bytes->sizes, steps = bytes->strides;
      }
      // "cannot be larger than 8 dimensions": reason of 1191 cases that hardware refuses, in every
      // operator and dtype (ci-test of Ascend/pytorch, disabled_testcases.json).
      emu::require(
          rank <= 8, "a tensor of shape ", sizes, " has ", rank, " dimensions; allowed: up to 8");
      const bool fractal = format == emu::kFractalNZ;
      auto stored = at::IntArrayRef(storage_dims, storage_rank);
      // A storage viewed as a wider dtype (int8 as int32 words of int4) keeps its description; the
      // view has the words' dimensions.
      const bool words = fractal && offset == 0 && rank == storage_rank &&
                         sizes.back() < stored.back() &&
                         sizes.slice(0, rank - 1) == stored.slice(0, rank - 1) &&
                         c10::contiguous_strides(sizes) == steps;
      if (words) stored = sizes;
      emu::require(
          !fractal || storage_rank >= 4, "a tensor in FRACTAL_NZ has the storage ", stored);
      char* base = nullptr;
      std::string why_host;
      if (data) {
        const auto item = static_cast<int64_t>(c10::elementSize(dtype));
        int64_t last = 0;  // offset of the last element
        for (uint64_t i = 0; i < rank; ++i) last += (sizes[i] - 1) * steps[i];
        if (fractal) last = c10::multiply_integers(stored) - 1;
        const bool empty = c10::multiply_integers(sizes) == 0;
        emu::Place place{static_cast<char*>(data) + (fractal ? 0 : offset * item), emu::kNoNpu};
        try {
          place = emu::locate(place.kernel, empty ? 0 : (last + 1) * item);
        } catch (const emu::Error& e) {
          if (emu::is_device(data)) throw;
          why_host = e.what();
        }
        base = static_cast<char*>(place.kernel);
        // An NPU cannot access another one's memory, and torch_npu does not check it.
        const int npu = emu::current_device();
        emu::require(place.npu == npu || place.npu == emu::kNoNpu,
            "a tensor that is not in the memory of NPU ", npu, ", where the operator runs");
      }
      emu::require(base || c10::multiply_integers(sizes) == 0, "a tensor of shape ", sizes,
          " has no memory");
      auto tensor = std::make_unique<aclTensor>();
      // This storage cannot be resized, so results are always written to the caller's memory.
      tensor->value = at::from_blob(base, sizes, steps, at::TensorOptions().dtype(dtype));
      if (fractal) {
        tensor->storage = at::from_blob(base, stored, at::TensorOptions().dtype(dtype));
        tensor->offset = offset;
      }
      if (!why_host.empty()) {
        std::lock_guard lock(emu::host_mutex);
        emu::host_tensors[tensor.get()] = why_host;
        emu::any_host_tensor = true;
      }
      return tensor.release();
    })
CREATE(aclScalar, aclCreateScalar, (void* value, int32_t type), {
  emu::require(value != nullptr, "value is null");
  return new aclScalar{emu::read_scalar(value, emu::to_scalar_type(type))};
})
CREATE(aclIntArray, aclCreateIntArray, (const int64_t* value, uint64_t size),
    { return new aclIntArray{{value, value + size}}; })
CREATE(aclFloatArray, aclCreateFloatArray, (const float* value, uint64_t size),
    { return new aclFloatArray{{value, value + size}}; })
// Plain braces would convert the two pointers to two bools.
CREATE(aclBoolArray, aclCreateBoolArray, (const bool* value, uint64_t size),
    { return new aclBoolArray{std::vector<bool>(value, value + size)}; })
CREATE(aclTensorList, aclCreateTensorList, (const aclTensor* const* value, uint64_t size),
    { return new aclTensorList{{value, value + size}}; })
CREATE(aclScalarList, aclCreateScalarList, (const aclScalar* const* value, uint64_t size),
    { return new aclScalarList{{value, value + size}}; })

ACL_API(keeps, aclDestroyTensor, (const aclTensor* tensor), { emu::destroy(tensor); })
DESTROY(aclScalar, aclDestroyScalar)
DESTROY(aclIntArray, aclDestroyIntArray)
DESTROY(aclFloatArray, aclDestroyFloatArray)
DESTROY(aclBoolArray, aclDestroyBoolArray)

// Lists own their members.
ACL_API(keeps, aclDestroyTensorList, (const aclTensorList* list), {
  if (list)
    for (const auto* item : list->items) emu::destroy(item);
  delete list;
})
ACL_API(keeps, aclDestroyScalarList, (const aclScalarList* list), {
  if (list)
    for (const auto* item : list->items) delete item;
  delete list;
})

// The caller frees the array with delete[] (op_plugin's nonzero, unique and masked_select do).
ACL_API(answers, aclGetViewShape, (const aclTensor* tensor, int64_t** dims, uint64_t* rank), {
  emu::required(tensor);
  const auto shape =
      tensor->has_result_shape ? at::IntArrayRef(tensor->result_shape) : tensor->value.sizes();
  *dims = new int64_t[shape.size()];
  std::copy(shape.begin(), shape.end(), *dims);
  *rank = shape.size();
})
