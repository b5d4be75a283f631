"""Part of pyACL, CANN's Python binding: the number and type of NPUs, for Ray (``ray/_private/accelerators/npu.py``).

It is found through PYTHONPATH (``activation.set_environment``), as with CANN's set_env.sh.
"""

import ctypes
import functools
import os
from pathlib import Path

from ascend_emulator import build


@functools.cache
def _library() -> ctypes.CDLL:
    for name in ("libc10.so", "libtorch_cpu.so"):  # normally loaded by torch
        ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "libascendcl.so")))


class rt:
    """`acl.rt` of pyACL."""

    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """Number of visible NPUs (ASCEND_RT_VISIBLE_DEVICES), and CANN's status, 0 on success."""
        count = ctypes.c_uint32()
        status = _library().aclrtGetDeviceCount(ctypes.byref(count))
        return count.value, status


def get_soc_name() -> str:
    """The chip's name, such as Ascend910B1."""
    name = _library().aclrtGetSocName
    name.restype = ctypes.c_char_p
    return name().decode()
