# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's operators by name, called as EXEC_NPU_CMD does: versions and shapes that the installed
torch_npu does not call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence  # noqa: F401
from ctypes import byref, c_uint64, c_void_p
from typing import Any

import pytest
import torch
import torch_npu
from ascend_emulator import facts

# The C types of an operator's arguments, a letter each (facts/arguments.toml).
KINDS = {name.removeprefix("aclnn"): kinds for name, kinds in facts.arguments().items()}
NUMBERS = {
    "i": ctypes.c_int64,
    "n": ctypes.c_int32,
    "c": ctypes.c_int8,
    "b": ctypes.c_bool,
    "d": ctypes.c_double,
    "f": ctypes.c_float,
}
ARRAYS = {"I": ("aclCreateIntArray", ctypes.c_int64), "F": ("aclCreateFloatArray", ctypes.c_float)}
ND, NZ = 2, 29
DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int64: 9,
    torch.float64: 11,
    torch.bool: 12,
    torch.bfloat16: 27,
    torch.float8_e5m2: 35,
    torch.float8_e4m3fn: 36,
    torch.float8_e8m0fnu: 37,
}


def needs_argument(operator: str, argument: str) -> pytest.MarkDecorator:
    """Skip a test of an argument that an operator has in later versions of torch_npu than the
    installed one."""
    lacks = f" {argument}=" not in str(getattr(torch.ops.npu, operator).default._schema)
    return pytest.mark.skipif(
        lacks, reason=f"{operator} of this torch_npu has no argument {argument}"
    )


def _kind(value: Any) -> str:
    """The letter of an argument that op-plugin's calls leave open, by its Python type."""
    first = value[0] if isinstance(value, list) and value else value
    of_list = {torch.Tensor: "L", bool: "B", int: "I", float: "F"}
    kinds = (
        of_list
        if isinstance(value, list)
        else {torch.Tensor: "T", str: "t", bool: "b", int: "i", float: "S"}
    )
    return next((kind for form, kind in kinds.items() if isinstance(first, form)), "T")


class Calls:
    """CANN's C interface. Arguments are Python values; None is a null pointer."""

    def __init__(self) -> None:
        self._size = c_uint64()  # of the last call's workspace
        self.library = ctypes.CDLL("libopapi.so")
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def new(self, create: str, *arguments: Any) -> c_void_p:
        function = getattr(self.library, create)
        function.restype = c_void_p
        return c_void_p(function(*arguments))

    def array(self, create: str, kind: Any, values: Sequence[Any]) -> c_void_p:
        return self.new(create, (kind * len(values))(*values), c_uint64(len(values)))

    def tensor(self, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> c_void_p:
        """``shape``: another than the tensor's, contiguous."""
        sizes = list(tensor.shape if shape is None else shape)
        strides = tensor.stride() if shape is None else torch.empty(sizes).stride()

        def longs(values: Sequence[int]) -> Any:
            return (ctypes.c_int64 * len(values))(*values)

        rank, offset = (
            c_uint64(len(sizes)),
            ctypes.c_int64(int(tensor.storage_offset()) if tensor.is_npu else 0),
        )
        data = tensor.untyped_storage().data_ptr()
        form = torch_npu.get_npu_format(tensor) if tensor.is_npu else ND
        if form == NZ:
            *batch, rows, columns = sizes
            width = 32 // tensor.element_size()
            stored = [*batch, -(-columns // width), -(-rows // 16), 16, width]
        else:
            stored = (
                [tensor.untyped_storage().nbytes() // tensor.element_size()]
                if shape is None
                else sizes
            )
        place = (
            longs(strides),
            offset,
            form if form == NZ else ND,
            longs(stored),
            c_uint64(len(stored)),
        )
        return self.new(
            "aclCreateTensor", longs(sizes), rank, DTYPES[tensor.dtype], *place, c_void_p(data)
        )

    def argument(self, kind: str, value: Any) -> Any:
        if value is None or type(value).__module__ == "ctypes":
            return value
        kind = _kind(value) if kind == "?" else kind
        if kind in NUMBERS:
            return NUMBERS[kind](value)
        if kind in ARRAYS:
            return self.array(*ARRAYS[kind], value)
        if kind == "S":  # an aclScalar
            return self.new("aclCreateScalar", byref(ctypes.c_float(value)), 0)
        if kind == "t":
            return ctypes.c_char_p(value.encode())
        if kind == "L":
            return self.array(
                "aclCreateTensorList", c_void_p, [self.tensor(each) for each in value]
            )
        return self.tensor(value)

    def workspace(self, name: str, *arguments: Any) -> tuple[int, c_void_p, str]:
        """The status of the first phase, the executor, and the message if it failed."""
        torch.npu.synchronize()  # torch_npu's queue may hold the operators that fill the arguments.
        size, executor = c_uint64(), c_void_p()
        kinds = KINDS.get(name, "?" * len(arguments))
        assert len(kinds) == len(arguments), f"aclnn{name} has {len(kinds)} arguments"
        given = [self.argument(kind, value) for kind, value in zip(kinds, arguments, strict=True)]
        status = getattr(self.library, f"aclnn{name}GetWorkspaceSize")(
            *given, byref(size), byref(executor)
        )
        self._size = size
        return status, executor, (self.library.aclGetRecentErrMsg() or b"").decode()

    def run(self, name: str, *arguments: Any) -> tuple[int, str]:
        """Both phases: the status and the message."""
        status, executor, message = self.workspace(name, *arguments)
        if status == 0:
            stream = c_void_p(torch.npu.current_stream().npu_stream)
            status = getattr(self.library, f"aclnn{name}")(None, self._size, executor, stream)
            message = (self.library.aclGetRecentErrMsg() or b"").decode()
        return status, message

    def compute(self, name: str, *arguments: Any) -> None:
        """Both phases of a call that is not refused."""
        assert self.run(name, *arguments) == (0, "")

    def refusal(self, name: str, *arguments: Any) -> str:
        """Error message of the first phase, without the operator's name and the class."""
        status, _, message = self.workspace(name, *arguments)
        assert status != 0
        message = message.removeprefix(f"[ascend-emulator] aclnn{name}: ")
        return message.removesuffix(" (CANN refuses, inferred)")
