# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A copy between two NPUs that no call of aclrtDeviceEnablePeerAccess preceded."""
# run: --npus 2
# refused: copying from NPU 0 to NPU 1, between which it is not enabled; call aclrtDeviceEnablePeerAccess
# source: CANN, aclrtDeviceEnablePeerAccess
# seen on hardware: no

import ctypes

import torch  # noqa: F401

acl, buffers, size = (
    ctypes.CDLL("libascendcl.so"),
    [ctypes.c_void_p(), ctypes.c_void_p()],
    ctypes.c_size_t(4096),
)
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
for npu, buffer in enumerate(buffers):
    assert acl.aclrtSetDevice(npu) == 0
    assert acl.aclrtMalloc(ctypes.byref(buffer), size, 0) == 0
status = acl.aclrtMemcpy(buffers[1], size, buffers[0], size, 3)
assert status == 0, acl.aclGetRecentErrMsg().decode()
