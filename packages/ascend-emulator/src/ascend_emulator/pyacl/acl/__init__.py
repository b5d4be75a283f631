# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Part of pyACL, CANN's Python binding, that Ray (``ray/_private/accelerators/npu.py``) and
vllm-ascend's allocator use.

It is found through PYTHONPATH (``activation.set_environment``), as with CANN's set_env.sh.
"""

import ctypes

from . import rt  # noqa: TID252  # the package is found as acl on sys.path

__all__ = ["get_soc_name", "rt"]


def get_soc_name() -> str:
    """The chip's name, such as Ascend910B1."""
    name = rt.library().aclrtGetSocName
    name.restype = ctypes.c_char_p
    return str(name().decode())
