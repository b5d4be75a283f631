# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A copy to memory of an NPU that was reset."""
# run:
# refused: 4096 bytes at 0x[0-9a-f]+, where 0 are allocated
# source: CANN, aclrtResetDevice
# seen on hardware: no

import ctypes

import torch  # noqa: F401

acl, buffer, size = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), ctypes.c_size_t(4096)
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
assert acl.aclrtSetDevice(0) == 0
assert acl.aclrtMalloc(ctypes.byref(buffer), size, 0) == 0
assert acl.aclrtResetDevice(0) == 0
assert acl.aclrtSetDevice(0) == 0
status = acl.aclrtMemset(buffer, size, 0, size)
assert status == 0, acl.aclGetRecentErrMsg().decode()
