"""The part of pyACL, CANN's Python binding, that asks which NPUs there are. Ray does (``ray/_private/accelerators/npu.py``).

As with CANN's set_env.sh, PYTHONPATH leads to it (``activation.set_environment``).
"""

import ctypes
import functools
import os
from pathlib import Path

from ascend_emulator import build


@functools.cache
def _library() -> ctypes.CDLL:
    for name in ("libc10.so", "libtorch_cpu.so"):  # which torch would have loaded before
        ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "libascendcl.so")))


class rt:
    """What is `acl.rt` in pyACL."""

    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """How many NPUs ASCEND_RT_VISIBLE_DEVICES shows, and CANN's status, which is 0 without an error."""
        count = ctypes.c_uint32()
        status = _library().aclrtGetDeviceCount(ctypes.byref(count))
        return count.value, status


def get_soc_name() -> str:
    """The chip's name, such as Ascend910B1."""
    name = _library().aclrtGetSocName
    name.restype = ctypes.c_char_p
    return name().decode()
