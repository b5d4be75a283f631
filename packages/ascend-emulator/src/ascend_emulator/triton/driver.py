# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Triton's driver and backend of emulated NPUs. Imported while Triton is."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ascend_emulator import cache, chips
from ascend_emulator.triton import compiler, llvm_ir

# Formats of struct, by the types of Triton's signatures; a slot has eight bytes.
FORMATS = {"i1": "?7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q", "u1": "?7x"}
FORMATS |= {"u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q", "fp16": "e6x", "fp32": "f4x"}
FORMATS |= {"f32": "f4x", "fp64": "d"}
POINTER_SLOTS = (0, 1 << 40, 1)  # Offset, size and stride of a memref, after its two addresses.
GRID_SLOTS = 6


class _Pointer(ctypes.Structure):
    """AscendEmulatorTritonPointer (csrc/runtime/triton.cpp)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("storage", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("slot", ctypes.c_int32),
    )


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libascend_emulator.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def _message() -> str:
    recent = _library().aclGetRecentErrMsg
    recent.restype = ctypes.c_char_p
    return (recent() or b"the launch failed").decode().strip()


class Utils:
    """Properties of devices for Triton, and the loading of kernels."""

    def get_device_properties(self, device: object = None) -> dict[str, int]:
        chip = chips.chip(self.get_arch())
        return {
            "max_shared_mem": 1,  # as triton-ascend's
            "num_aicore": chip.cube_cores,
            "num_vectorcore": chip.vector_cores,
        }

    def get_aicore_num(self) -> int:
        return self.get_device_properties()["num_aicore"]

    def get_aivector_core_num(self) -> int:
        return self.get_device_properties()["num_vectorcore"]

    def get_arch(self) -> str:
        return os.environ["ASCEND_EMULATOR_SOC"]

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[ctypes.CDLL, tuple[str, int], int, int]:
        """The library of a kernel, and the kernel's name and address."""
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(kernel)
            file.flush()
            library = ctypes.CDLL(file.name)
        address = ctypes.cast(getattr(library, llvm_ir.ENTRY), ctypes.c_void_p).value
        assert address
        return library, (name.split()[0], address), 0, 0


class Launcher:
    """Launches one kernel: its arguments become slots of eight bytes."""

    def __init__(self, src: Any, metadata: Any):
        names = src.fn.arg_names if hasattr(src, "fn") else [str(key) for key in src.signature]

        def position(key: object) -> int:
            return names.index(key) if isinstance(key, str) else int(str(key))

        constants = {position(key) for key in getattr(src, "constants", {})}
        signature = sorted((position(key), type_) for key, type_ in src.signature.items())
        self._parameters = [
            None if place in constants else (names[place], type_) for place, type_ in signature
        ]
        for parameter in filter(None, self._parameters):
            if parameter[1][0] != "*" and parameter[1] not in FORMATS:
                raise NotImplementedError(
                    f"argument {parameter[0]} has the type {parameter[1]}; supported: tensors,"
                    f" {', '.join(FORMATS)}"
                )

    def _slots(self, arguments: tuple[Any, ...]) -> Iterator[tuple[bytes, _Pointer | None]]:
        for parameter, value in zip(self._parameters, arguments, strict=True):
            if parameter is None:
                continue
            name, type_ = parameter
            if type_[0] != "*":
                yield struct.pack(FORMATS[type_], value), None
                continue
            pointer, dtype = None, type_.lstrip("*").encode()
            if hasattr(value, "untyped_storage"):
                storage = value.untyped_storage()
                address = value.data_ptr()
                if value.device.type != "npu":
                    raise ValueError(
                        f"argument {name} is on {value.device}; supported: npu; fix: {name}.npu()"
                    )
                if size := storage.nbytes():
                    pointer = _Pointer(name.encode(), dtype, storage.data_ptr(), size)
            else:
                address = value if isinstance(value, int) else value.data_ptr() if value else 0
                if address:
                    pointer = _Pointer(name.encode(), dtype, address, 0)
            yield struct.pack("5q", address, address, *POINTER_SLOTS), pointer

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: tuple[str, int],
        packed_metadata: object,
        launch_metadata: object,
        enter: Callable[[object], None] | None,
        leave: Callable[[object], None] | None,
        *arguments: Any,
    ) -> None:
        if enter:
            enter(launch_metadata)
        slots = struct.pack("10q", *(0, 0, *POINTER_SLOTS) * 2)
        pointers = []
        for packed, pointer in self._slots(arguments):
            if pointer:
                pointer.slot = len(slots) // 8
                pointers.append(pointer)
            slots += packed
        slots += struct.pack(f"{GRID_SLOTS}q", x, y, z, 0, 0, 0)
        name, address = function
        status = _library().ascend_emulator_triton_launch(
            name.encode(),
            ctypes.c_void_p(address),
            slots,
            len(slots) // 8,
            (_Pointer * len(pointers))(*pointers),
            len(pointers),
            os.environ.get("TRITON_ALL_BLOCKS_PARALLEL", "0") != "0",
            ctypes.c_void_p(stream),
        )
        if status:
            raise RuntimeError(_message())
        if leave:
            leave(launch_metadata)


class Driver(DriverBase):
    """The emulated NPUs."""

    def __init__(self) -> None:
        self.utils = Utils()
        self.launcher_cls = Launcher
        super().__init__()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", self.utils.get_arch(), 0)

    def get_current_device(self) -> int:
        import torch

        return int(torch.npu.current_device())

    def set_current_device(self, device: int) -> None:
        import torch

        torch.npu.set_device(device)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("npu", self.get_current_device())

    def get_current_stream(self, device: int | None = None) -> int:
        """The stream, once torch_npu has launched the operators that it has queued."""
        from torch_npu._C import _npu_getCurrentRawStream

        where = self.get_current_device() if device is None else device
        return int(_npu_getCurrentRawStream(where))

    def get_device_interface(self) -> Any:
        import torch

        return torch.npu

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1 << 20, dtype=torch.int32, device="npu")

    def clear_cache(self, memory: Any) -> None:
        memory.zero_()


def backend(original: Any) -> Any:
    """triton-ascend's backend, with kernels for this processor and the driver of emulated NPUs."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache.root() / "triton"))
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "0")  # for the messages of checks

    class Compiler(original.compiler):
        def add_stages(self, stages: dict[str, Any], options: Any, *more: Any) -> None:
            super().add_stages(stages, options, *more)
            if "ttadapter" not in stages:
                raise NotImplementedError(
                    "compile_mode 'simt_only' is not supported by the emulator's Triton driver;"
                    " supported: simd"
                )
            stages["npubin"] = compiler.compiled

        def hash(self) -> str:
            return f"{super().hash()}-{compiler.version()}"

    return type(original)(Compiler, Driver)
