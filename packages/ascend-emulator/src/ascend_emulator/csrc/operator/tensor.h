// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Argument objects of aclnn calls. They are opaque to torch_npu, so each holds an ATen value;
// tensors alias device memory through the kernel mapping (core/device.h). Signatures:
// op_plugin/utils/op_api_common_base.h in the torch_npu wheel (BSD).
#pragma once
#include <ATen/core/Tensor.h>

#include "core/status.h"

struct aclTensor {
  at::Tensor value;
  std::vector<int64_t>
      result_shape;  // returned by aclGetViewShape; set by operators with data-dependent shapes
  bool has_result_shape = false;
  at::Tensor storage;  // of a tensor in FRACTAL_NZ, which has only its shape in `value`: the values
                       // as they lie in memory
  int64_t offset = 0;  // of `value` in the storage, in elements
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> value;
};
struct aclFloatArray {
  std::vector<float> value;
};
struct aclBoolArray {
  std::vector<bool> value;
};
struct aclTensorList {
  std::vector<const aclTensor*> items;
};
struct aclScalarList {
  std::vector<const aclScalar*> items;
};

namespace emu {

// aclDataType, the public enumeration (CANN's API reference, "aclDataType"; torch_npu's
// CalcuOpUtil.cpp shows the pairs).
at::ScalarType to_scalar_type(int32_t acl_type);

// Whether an argument was given. Throws if it is null because its creation failed.
bool given(const void* object);
void required(const void* object);  // throws if it was not given

// Weight of a matrix product, [..., k, n], or its transpose, which may be in FRACTAL_NZ: the
// storage is [..., n / c0, k / 16, 16, c0], rounded up. Such a weight is a buffer of its own, into
// which each execution copies the values in row-major order.
struct Weight : at::Tensor {
  at::Tensor storage;  // undefined unless in FRACTAL_NZ
};
struct Weights : std::vector<at::Tensor> {
  std::vector<at::Tensor> storages;
};
// A tensor as it lies in memory.
struct Stored {
  at::Tensor value, storage;
};
struct Fractal {
  at::Tensor storage, matrix;
  void unpack() const;
  void pack() const;
};
// The matrix in row-major order, not initialized. Throws unless the tensor is the whole matrix in
// the storage, or its transpose.
at::Tensor matrix_of(const std::string& name, const aclTensor& tensor);

// index_put_ of indices of the first dimensions. c10::List, which it takes, is parsed in this unit
// only (aten/ATen/DeviceGuard.h).
void put_rows(const at::Tensor& out, at::TensorList indices, const at::Tensor& rows);

enum AclFormat : int32_t { kNCHW = 0, kND = 2, kFractalNZ = 29 };

}  // namespace emu
