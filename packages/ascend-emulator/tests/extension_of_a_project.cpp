// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// A torch extension of a project, for test_operators.py: it calls the project's kernel as
// EXEC_NPU_CMD does, by two functions that it looks up in libcust_opapi.so and libopapi.so.
#include <ATen/ops/empty_like.h>
#include <dlfcn.h>
#include <torch/library.h>

struct aclTensor;
struct aclScalar;
struct aclIntArray;
struct aclOpExecutor;

template <class Function> Function* function(const std::string& name) {
  for (const char* library : {"libcust_opapi.so", "libopapi.so", "libnnopbase.so"})
    if (void* handle = dlopen(library, RTLD_LAZY))
      if (void* found = dlsym(handle, name.c_str())) return reinterpret_cast<Function*>(found);
  TORCH_CHECK(false, name, " not in libcust_opapi.so or libopapi.so");
}

aclTensor* acl_tensor(const at::Tensor& x) {
  using Create = aclTensor*(
      const int64_t*, uint64_t, int, const int64_t*, int64_t, int, const int64_t*, uint64_t, void*);
  TORCH_CHECK(x.scalar_type() == at::kFloat);
  const int64_t stored = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  return function<Create>("aclCreateTensor")(x.sizes().data(), x.dim(), 0, x.strides().data(),
      x.storage_offset(), 2, &stored, 1, x.storage().mutable_data());
}

at::Tensor add_custom(const at::Tensor& x, const at::Tensor& y, double alpha,
    const std::string& kernel, int64_t stream) {
  using Workspace =
      int(aclTensor*, aclTensor*, aclScalar*, aclIntArray*, aclTensor*, uint64_t*, aclOpExecutor**);
  const auto workspace_size = function<Workspace>(kernel + "GetWorkspaceSize");
  const auto launch = function<int(void*, uint64_t, aclOpExecutor*, void*)>(kernel);
  auto out = at::empty_like(x);
  float value = static_cast<float>(alpha);
  uint64_t bytes = 0;
  aclOpExecutor* executor = nullptr;
  int status = workspace_size(acl_tensor(x), acl_tensor(y),
      function<aclScalar*(void*, int)>("aclCreateScalar")(&value, 0),
      function<aclIntArray*(const int64_t*, uint64_t)>("aclCreateIntArray")(nullptr, 0),
      acl_tensor(out), &bytes, &executor);
  if (status == 0) status = launch(nullptr, bytes, executor, reinterpret_cast<void*>(stream));
  TORCH_CHECK(status == 0, function<const char*()>("aclGetRecentErrMsg")());
  return out;
}

TORCH_LIBRARY(a_project, library) {
  library.def("add_custom(Tensor x, Tensor y, float alpha, str kernel, int stream) -> Tensor");
}
TORCH_LIBRARY_IMPL(a_project, PrivateUse1, library) { library.impl("add_custom", &add_custom); }
