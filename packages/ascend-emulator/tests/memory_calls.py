# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's memory calls through ctypes, for tests of those that torch has no function for."""

import ctypes

from ascend_emulator import build

MIB = 1 << 20
HOST, DEVICE, UNREGISTERED = 0, 1, 2
acl = ctypes.CDLL(f"lib{build.CORE}.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p


class Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int32))


class Physical(ctypes.Structure):
    _fields_ = (
        ("handle_type", ctypes.c_int32),
        ("allocation_type", ctypes.c_int32),
        ("attribute", ctypes.c_int32),
        ("location", Location),
        ("reserved", ctypes.c_uint64),
    )


class Attributes(ctypes.Structure):
    _fields_ = (
        ("location", Location),
        ("page", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
    )


class Batch(ctypes.Structure):
    _fields_ = (("to", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16))


def message() -> str:
    """Error message of the last call that failed."""
    return (acl.aclGetRecentErrMsg() or b"").decode()


def check(status: int) -> None:
    """The call succeeded."""
    assert status == 0, message()


def refused(status: int, code: int | None = None) -> str:
    """The call failed, with this code; its message."""
    assert status != 0
    assert code in (None, status)
    return message()


def address_of(tensor) -> ctypes.c_void_p:
    """Device address of a tensor whose values are there."""
    import torch

    torch.npu.synchronize()
    return ctypes.c_void_p(tensor.data_ptr())
