# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ctypes bindings of HCCL's functions, on a caller's stream: the counterpart of vLLM's pynccl.

torch.distributed runs collectives on a stream of its own, with events and a watchdog. Here a
collective is one call on the given stream, also in graph capture. Declarations and constants are
those of Huawei's public API reference "HCCL" (each function's page, HcclDataType, HcclReduceOp,
HcclRootInfo).
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch.distributed import ProcessGroup, ReduceOp
from vllm.distributed.utils import StatelessProcessGroup

Stream = Any  # torch.npu.Stream or None. The class exists only after torch_npu is imported.

LIBRARY = "libhccl.so"
ROOT_INFO_BYTES = 4108

DTYPES = {
    torch.int8: 0,
    torch.int16: 1,
    torch.int32: 2,
    torch.float16: 3,
    torch.float32: 4,
    torch.int64: 5,
    torch.uint64: 6,
    torch.uint8: 7,
    torch.uint16: 8,
    torch.uint32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
    torch.bool: 7,  # Only for data movement, as in torch_npu. HCCL does not reduce it.
}
"""HcclDataType of each dtype. HCCL decides which of them a chip moves and which it reduces."""

OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
"""HcclReduceOp of each operation."""

_P, _COUNT, _RANK, _ENUM = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "HcclGetRootInfo": (_P,),
    "HcclCommInitRootInfo": (_RANK, _P, _RANK, _P),
    "HcclCommDestroy": (_P,),
    "HcclAllReduce": (_P, _P, _COUNT, _ENUM, _ENUM, _P, _P),
    "HcclReduce": (_P, _P, _COUNT, _ENUM, _ENUM, _RANK, _P, _P),
    "HcclReduceScatter": (_P, _P, _COUNT, _ENUM, _ENUM, _P, _P),
    "HcclReduceScatterV": (_P, _P, _P, _P, _COUNT, _ENUM, _ENUM, _P, _P),
    "HcclAllGather": (_P, _P, _COUNT, _ENUM, _P, _P),
    "HcclAllGatherV": (_P, _COUNT, _P, _P, _P, _ENUM, _P, _P),
    "HcclBroadcast": (_P, _COUNT, _ENUM, _RANK, _P, _P),
    "HcclAlltoAllV": (_P, _P, _P, _ENUM, _P, _P, _P, _ENUM, _P, _P),
    "HcclSend": (_P, _COUNT, _ENUM, _RANK, _P, _P),
    "HcclRecv": (_P, _COUNT, _ENUM, _RANK, _P, _P),
    "HcclGroupStart": (),
    "HcclGroupEnd": (),
}


class HCCLError(RuntimeError):
    """A function of HCCL failed; the message has its name, HcclResult and error string in
    one line."""


class HCCLLibrary:
    """The shared library libhccl.

    Args:
        path: library file; defaults to the environment variable ``HCCL_SO_PATH``, then to
            ``libhccl.so``.

    Raises:
        RuntimeError: the library cannot be loaded.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or os.environ.get("HCCL_SO_PATH") or LIBRARY
        try:
            self._library = ctypes.CDLL(self.path)
        except OSError as error:
            raise RuntimeError(
                f"HCCL's library {self.path} cannot be loaded ({error}); source CANN's set_env.sh,"
                " or set HCCL_SO_PATH to the file"
            ) from None
        self._library.HcclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by name.

        Raises:
            HCCLError: the call failed.
            RuntimeError: this version of the library lacks the function.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise RuntimeError(f"{self.path} has no {name}; install a newer CANN") from None
        function.argtypes = _FUNCTIONS[name]
        if status := function(*arguments):
            text = (self._library.HcclGetErrorString(status) or b"").decode(errors="replace")
            raise HCCLError(f"{name} failed with {status} ({text}){_details()}")


def _details() -> str:
    """Error message of CANN's runtime for the last failure in this thread."""
    get_message = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    get_message.restype = ctypes.c_char_p
    text = " ".join((get_message() or b"").decode(errors="replace").split())
    return f": {text}" if text else ""


@functools.cache
def load(path: str | None = None) -> HCCLLibrary:
    """Load the library of this path, once per process."""
    return HCCLLibrary(path)


def _exchange(group: StatelessProcessGroup, info: torch.Tensor) -> torch.Tensor:
    """Rank 0's root information, ``[ROOT_INFO_BYTES]``, as bytes.

    The group's own broadcasts are pickles: whoever names rank 0's address to a worker could run
    code in it.

    Raises:
        RuntimeError: rank 0 has sent something else.
    """
    if group.rank == 0:
        key = f"hccl_root_info/{group.broadcast_send_counter}"
        group.store.set(key, info.numpy().tobytes())  # type: ignore[arg-type]  # takes bytes, as vLLM gives it
        group.broadcast_send_counter += 1
        return info
    received = group.store.get(f"hccl_root_info/{group.broadcast_recv_src_counter[0]}")
    group.broadcast_recv_src_counter[0] += 1
    if len(received) != ROOT_INFO_BYTES:
        raise RuntimeError(
            f"rank 0 of the group sent {len(received)} bytes of root information; HCCL's has"
            f" {ROOT_INFO_BYTES}; fix: use the same ascend-communicator on all ranks"
        )
    return torch.frombuffer(bytearray(received), dtype=torch.uint8)


class PyHcclCommunicator:
    """HCCL collectives among the ranks of a group, with the arguments of vLLM's
    ``PyNcclCommunicator``.

    Every method queues one call on ``stream`` (``torch.npu.Stream``; the current one if None) and
    returns. Tensors must be contiguous, on this communicator's NPU, and must not be freed before
    the stream has used them. A method raises ValueError for unsuitable tensors, RuntimeError after
    ``destroy``, and HCCLError for errors of HCCL.

    Args:
        group: a CPU group (gloo) or vLLM's ``StatelessProcessGroup``, used to exchange HCCL's root
            information.
        device: the NPU.
        library_path: see :class:`HCCLLibrary`.

    Raises:
        ValueError: the group's backend is hccl.
        RuntimeError: libhccl cannot be loaded.
        HCCLError: HCCL cannot connect the ranks within ``HCCL_CONNECT_TIMEOUT``.
    """

    def __init__(
        self,
        group: ProcessGroup | StatelessProcessGroup,
        device: int | str | torch.device,
        library_path: str | None = None,
    ) -> None:
        self.group, self.library = group, load(library_path)
        self.device = (
            torch.device("npu", device) if isinstance(device, int) else torch.device(device)
        )
        info = torch.zeros(ROOT_INFO_BYTES, dtype=torch.uint8)
        if isinstance(group, StatelessProcessGroup):
            self.rank, self.world_size = group.rank, group.world_size
        elif dist.get_backend(group) == "hccl":
            raise ValueError(
                "PyHcclCommunicator needs a CPU group, such as gloo; the group's backend is hccl"
            )
        else:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._comm: int | None = None
        with torch.npu.device(self.device):
            # This opens the NPU. It does not synchronize the device, because another stream may
            # wait for a failed rank.
            torch.npu.current_stream().synchronize()
            if self.rank == 0:
                self.library.call("HcclGetRootInfo", info.data_ptr())
            if isinstance(group, StatelessProcessGroup):
                info = _exchange(group, info)
            else:
                dist.broadcast(info, src=dist.get_process_group_ranks(group)[0], group=group)
            comm = ctypes.c_void_p()
            self.library.call(
                "HcclCommInitRootInfo",
                self.world_size,
                info.data_ptr(),
                self.rank,
                ctypes.byref(comm),
            )
        self._comm = comm.value

    def all_reduce(
        self,
        in_tensor: torch.Tensor,
        out_tensor: torch.Tensor | None = None,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> torch.Tensor:
        """Reduce ``in_tensor`` of all ranks into ``out_tensor``, which may be ``in_tensor``; into a
        new tensor if None."""
        out = torch.empty_like(in_tensor) if out_tensor is None else out_tensor
        count, kind = in_tensor.numel(), self._reduction(in_tensor, op)
        self._check_match(in_tensor, out, count)
        self._run("HcclAllReduce", stream, in_tensor, out, count, *kind)
        return out

    def reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        root: int,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """Reduce to rank ``root``; on other ranks ``output_tensor`` is unchanged."""
        count, kind = input_tensor.numel(), self._reduction(input_tensor, op)
        self._check_match(input_tensor, output_tensor, count)
        self._run("HcclReduce", stream, input_tensor, output_tensor, count, *kind, root)

    def all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, stream: Stream = None
    ) -> None:
        """Concatenate ``input_tensor`` of all ranks into ``output_tensor``."""
        count, kind = input_tensor.numel(), self._dtype(input_tensor)
        self._check_match(input_tensor, output_tensor, count * self.world_size)
        self._run("HcclAllGather", stream, input_tensor, output_tensor, count, kind)

    def all_gatherv(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        sizes: list[int],
        stream: Stream = None,
    ) -> None:
        """All-gather with ``sizes[rank]`` rows of each rank."""
        counts, starts = self._rows(sizes, output_tensor)
        self._check_match(output_tensor, input_tensor, counts[self.rank])
        sent = input_tensor, input_tensor.numel()
        kind = self._dtype(input_tensor)
        self._run("HcclAllGatherV", stream, *sent, output_tensor, counts, starts, kind)

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """Reduce ``input_tensor`` of all ranks and scatter equal parts into ``output_tensor``."""
        count, kind = output_tensor.numel(), self._reduction(input_tensor, op)
        self._check_match(output_tensor, input_tensor, count * self.world_size)
        self._run("HcclReduceScatter", stream, input_tensor, output_tensor, count, *kind)

    def reduce_scatterv(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        sizes: list[int],
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """Reduce-scatter with ``sizes[rank]`` rows for each rank."""
        counts, starts = self._rows(sizes, input_tensor)
        self._check_match(input_tensor, output_tensor, counts[self.rank])
        received = output_tensor, output_tensor.numel()
        kind = self._reduction(input_tensor, op)
        self._run("HcclReduceScatterV", stream, input_tensor, counts, starts, *received, *kind)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream = None) -> None:
        """Broadcast ``tensor`` from rank ``src``."""
        self._run("HcclBroadcast", stream, tensor, tensor.numel(), self._dtype(tensor), src)

    def all_to_all(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        stream: Stream = None,
    ) -> None:
        """All-to-all: send ``input_sizes[i]`` rows to rank i, and receive ``output_sizes[i]`` rows
        from it."""
        sent = self._rows(input_sizes, input_tensor)
        received = self._rows(output_sizes, output_tensor)
        self._check_match(input_tensor, output_tensor, output_tensor.numel())
        kind = self._dtype(input_tensor)
        self._run(
            "HcclAlltoAllV", stream, input_tensor, *sent, kind, output_tensor, *received, kind
        )

    def send(self, tensor: torch.Tensor, dst: int, stream: Stream = None) -> None:
        """Send ``tensor`` to rank ``dst``."""
        self._run("HcclSend", stream, tensor, tensor.numel(), self._dtype(tensor), dst)

    def recv(self, tensor: torch.Tensor, src: int, stream: Stream = None) -> None:
        """Receive ``tensor`` from rank ``src``."""
        self._run("HcclRecv", stream, tensor, tensor.numel(), self._dtype(tensor), src)

    def group_start(self) -> None:
        """Start a group: calls of this thread are queued together at ``group_end``, for example
        sends in both directions."""
        self._open()
        self.library.call("HcclGroupStart")

    def group_end(self) -> None:
        """Queue the calls since ``group_start``."""
        self.library.call("HcclGroupEnd")

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Context manager of ``group_start`` and ``group_end``."""
        self.group_start()
        try:
            yield
        finally:
            self.group_end()

    def destroy(self) -> None:
        """Destroy the communicator after the NPU has finished; idempotent. Graphs that captured it
        become invalid."""
        comm, self._comm = self._comm, None
        if comm is not None:
            with torch.npu.device(self.device):
                torch.npu.synchronize()
                self.library.call("HcclCommDestroy", comm)

    def _open(self) -> int:
        if self._comm is None:
            raise RuntimeError("this PyHcclCommunicator has been destroyed; create another")
        return self._comm

    def _run(self, name: str, stream: Stream, *arguments: Any) -> None:
        comm = self._open()
        for each in arguments:
            if isinstance(each, torch.Tensor):
                if each.device != self.device:
                    raise ValueError(
                        f"this PyHcclCommunicator is on {self.device}; a tensor is on {each.device}"
                    )
                if not each.is_contiguous():
                    raise ValueError(
                        f"HCCL needs contiguous tensors; {list(each.shape)} has strides"
                        f" {each.stride()}"
                    )
        # Reading the handle flushes torch_npu's task queue, which may still hold the operators that
        # write the tensors.
        handle = (torch.npu.current_stream(self.device) if stream is None else stream).npu_stream
        plain = (each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
        self.library.call(name, *plain, comm, handle)

    @staticmethod
    def _dtype(tensor: torch.Tensor) -> int:
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise ValueError(
                f"HCCL does not support {str(tensor.dtype).removeprefix('torch.')}; supported:"
                f" {names}"
            )
        return DTYPES[tensor.dtype]

    def _reduction(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> tuple[int, int]:
        if op not in OPERATIONS:
            raise ValueError(
                f"HCCL does not support reduction by {op}; supported: SUM, PRODUCT, MAX, MIN"
            )
        return self._dtype(tensor), OPERATIONS[op]

    @staticmethod
    def _check_match(tensor: torch.Tensor, other: torch.Tensor, elements: int) -> None:
        if other.dtype != tensor.dtype or other.numel() != elements:
            raise ValueError(
                f"expected {elements} elements of {tensor.dtype}; found {other.numel()} of"
                f" {other.dtype}"
            )

    def _rows(self, sizes: list[int], tensor: torch.Tensor) -> tuple[Any, Any]:
        """Element counts and offsets of each rank's rows of a tensor, as C arrays of uint64."""
        if len(sizes) != self.world_size or sum(sizes) != len(tensor):
            raise ValueError(
                f"sizes {sizes} are for {len(sizes)} ranks and {sum(sizes)} rows; expected"
                f" {self.world_size} ranks and {len(tensor)} rows"
            )
        width, array = tensor[:1].numel() if len(tensor) else 0, ctypes.c_uint64 * self.world_size
        counts = [size * width for size in sizes]
        return array(*counts), array(*itertools.accumulate([0, *counts[:-1]]))
