# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`acl.rt` of pyACL: runtime calls."""

import ctypes
import functools
import os
from pathlib import Path

from ascend_emulator import build


@functools.cache
def library() -> ctypes.CDLL:
    """libascendcl.so; libraries that torch normally loads come first."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "libascendcl.so")))


def get_device_count() -> tuple[int, int]:
    """Number of visible NPUs (ASCEND_RT_VISIBLE_DEVICES), and CANN's status, 0 on success."""
    count = ctypes.c_uint32()
    status = library().aclrtGetDeviceCount(ctypes.byref(count))
    return count.value, status


def memcpy(dst: int, dest_max: int, src: int, count: int, kind: int) -> int:
    """Copy `count` bytes between addresses; `kind` is an aclrtMemcpyKind. CANN's status, 0 on
    success."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    return int(library().aclrtMemcpy(pointer(dst), size(dest_max), pointer(src), size(count), kind))
