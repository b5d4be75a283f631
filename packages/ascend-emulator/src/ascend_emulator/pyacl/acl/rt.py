"""`acl.rt` of pyACL: runtime calls. Addresses are integers."""

import ctypes
import functools
import os
from pathlib import Path

from ascend_emulator import build


@functools.cache
def library() -> ctypes.CDLL:
    """The emulated libascendcl.so."""
    for name in ("libc10.so", "libtorch_cpu.so"):  # normally loaded by torch
        ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "libascendcl.so")))


def get_device_count() -> tuple[int, int]:
    """Number of visible NPUs (ASCEND_RT_VISIBLE_DEVICES), and CANN's status, 0 on success."""
    count = ctypes.c_uint32()
    status = library().aclrtGetDeviceCount(ctypes.byref(count))
    return count.value, status


def memcpy(dst: int, dest_max: int, src: int, count: int, direction: int) -> int:
    """Copy ``count`` bytes to an address with room for ``dest_max``; return CANN's status, 0 on success."""
    size, address = ctypes.c_size_t, ctypes.c_void_p
    return int(library().aclrtMemcpy(address(dst), size(dest_max), address(src), size(count), ctypes.c_int32(direction)))
