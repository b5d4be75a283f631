"""HCCL's own functions through ctypes, on a stream of one's choice: the counterpart of vLLM's pynccl.

torch.distributed runs collectives on a stream of its own, with events and a watchdog around them. Here a collective is one
call on the given stream and nothing else, in a capture too. Declarations and numbers are those of Huawei's public API
reference "HCCL" (each function's page, HcclDataType, HcclReduceOp, HcclRootInfo).
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
import torch_npu  # noqa: F401  (torch.npu)
from torch.distributed import ProcessGroup, ReduceOp
from vllm.distributed.utils import StatelessProcessGroup

Stream = Any  # torch.npu.Stream or None; torch_npu makes that class as it is imported

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
    torch.bool: 7,  # to move, as torch_npu does; HCCL adds neither
}
"""HcclDataType of each dtype. Which of them a chip moves, and which it reduces, is HCCL's to say."""

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
    """A function of HCCL failed; one line with its name, HcclResult and what HCCL says of it."""


class HCCLLibrary:
    """libhccl, found by the linker under its name.

    Args:
        path: of another library; else the environment variable ``HCCL_SO_PATH``, else ``libhccl.so``.

    Raises:
        RuntimeError: the library cannot be loaded.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or os.environ.get("HCCL_SO_PATH") or LIBRARY
        try:
            self._library = ctypes.CDLL(self.path)
        except OSError as error:
            raise RuntimeError(
                f"HCCL's library {self.path} cannot be loaded ({error}); source CANN's set_env.sh, or set HCCL_SO_PATH to "
                "the file"
            ) from None
        self._library.HcclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name.

        Raises:
            HCCLError: it failed.
            RuntimeError: this version of the library does not have it.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise RuntimeError(f"{self.path} has no {name}; a newer CANN has") from None
        function.argtypes = _FUNCTIONS[name]
        if status := function(*arguments):
            text = (self._library.HcclGetErrorString(status) or b"").decode(errors="replace")
            raise HCCLError(f"{name} failed with {status} ({text}){_details()}")


def _details() -> str:
    """What CANN's runtime, which torch_npu has loaded, says of the last failure in this thread."""
    ask = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    ask.restype = ctypes.c_char_p
    text = " ".join((ask() or b"").decode(errors="replace").split())
    return f": {text}" if text else ""


@functools.cache
def load(path: str | None = None) -> HCCLLibrary:
    """The library of this path, once per process."""
    return HCCLLibrary(path)


class PyHcclCommunicator:
    """HCCL's collectives between the ranks of a group, with the arguments of vLLM's ``PyNcclCommunicator``.

    Every method queues one call on ``stream`` (``torch.npu.Stream``; the current one if None) and returns. The tensors must be
    contiguous, on this communicator's NPU, and live until the stream is done with them. Each method raises ValueError where they
    do not fit, RuntimeError after ``destroy``, and HCCLError where HCCL refuses.

    Args:
        group: a group without devices (gloo), or vLLM's ``StatelessProcessGroup``, over which the ranks find each other.
        device: the NPU.
        library_path: of libhccl, see :class:`HCCLLibrary`.

    Raises:
        ValueError: the group is HCCL's own.
        RuntimeError: there is no libhccl.
        HCCLError: HCCL cannot connect the ranks; it waits for them for as long as ``HCCL_CONNECT_TIMEOUT`` says.
    """

    def __init__(
        self, group: ProcessGroup | StatelessProcessGroup, device: int | str | torch.device, library_path: str | None = None
    ) -> None:
        self.group, self.library = group, load(library_path)
        self.device = torch.device("npu", device) if isinstance(device, int) else torch.device(device)
        info = torch.zeros(ROOT_INFO_BYTES, dtype=torch.uint8)
        if isinstance(group, StatelessProcessGroup):
            self.rank, self.world_size = group.rank, group.world_size
        elif dist.get_backend(group) == "hccl":
            raise ValueError("PyHcclCommunicator connects its ranks over a group on the CPU, such as gloo; this one is hccl's")
        else:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._comm: int | None = None
        with torch.npu.device(self.device):
            torch.npu.current_stream().synchronize()  # the NPU is open; another stream may wait for a rank that is gone
            if self.rank == 0:
                self.library.call("HcclGetRootInfo", info.data_ptr())
            if isinstance(group, StatelessProcessGroup):
                info = group.broadcast_obj(info, src=0)
            else:
                dist.broadcast(info, src=dist.get_process_group_ranks(group)[0], group=group)
            comm = ctypes.c_void_p()
            self.library.call("HcclCommInitRootInfo", self.world_size, info.data_ptr(), self.rank, ctypes.byref(comm))
        self._comm = comm.value

    def all_reduce(
        self,
        in_tensor: torch.Tensor,
        out_tensor: torch.Tensor | None = None,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> torch.Tensor:
        """The ranks' ``in_tensor`` reduced into ``out_tensor``, which may be the same; without one into a new tensor."""
        out = torch.empty_like(in_tensor) if out_tensor is None else out_tensor
        self._like(in_tensor, out, in_tensor.numel())
        self._run("HcclAllReduce", stream, in_tensor, out, in_tensor.numel(), *self._reduction(in_tensor, op))
        return out

    def reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        root: int,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """As ``all_reduce``, for rank ``root`` alone; on the others ``output_tensor`` stays as it is."""
        self._like(input_tensor, output_tensor, input_tensor.numel())
        kind = self._reduction(input_tensor, op)
        self._run("HcclReduce", stream, input_tensor, output_tensor, input_tensor.numel(), *kind, root)

    def all_gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, stream: Stream = None) -> None:
        """The ranks' ``input_tensor`` one after the other into ``output_tensor``, which has as many elements as all."""
        self._like(input_tensor, output_tensor, input_tensor.numel() * self.world_size)
        self._run("HcclAllGather", stream, input_tensor, output_tensor, input_tensor.numel(), self._dtype(input_tensor))

    def all_gatherv(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        sizes: list[int],
        stream: Stream = None,
    ) -> None:
        """As ``all_gather`` with ``sizes[rank]`` rows of each rank."""
        counts, starts = self._rows(sizes, output_tensor)
        self._like(output_tensor, input_tensor, counts[self.rank])
        kind = self._dtype(input_tensor)
        self._run("HcclAllGatherV", stream, input_tensor, input_tensor.numel(), output_tensor, counts, starts, kind)

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """The ranks' ``input_tensor`` reduced, of which each gets an equal part into ``output_tensor``."""
        self._like(output_tensor, input_tensor, output_tensor.numel() * self.world_size)
        kind = self._reduction(input_tensor, op)
        self._run("HcclReduceScatter", stream, input_tensor, output_tensor, output_tensor.numel(), *kind)

    def reduce_scatterv(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        sizes: list[int],
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        stream: Stream = None,
    ) -> None:
        """As ``reduce_scatter`` with ``sizes[rank]`` rows for each rank."""
        counts, starts = self._rows(sizes, input_tensor)
        self._like(input_tensor, output_tensor, counts[self.rank])
        kind = self._reduction(input_tensor, op)
        self._run("HcclReduceScatterV", stream, input_tensor, counts, starts, output_tensor, output_tensor.numel(), *kind)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream = None) -> None:
        """Rank ``src``'s ``tensor`` into that of all ranks."""
        self._run("HcclBroadcast", stream, tensor, tensor.numel(), self._dtype(tensor), src)

    def all_to_all(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        stream: Stream = None,
    ) -> None:
        """``input_sizes[i]`` rows of ``input_tensor`` to rank i, and ``output_sizes[i]`` rows of ``output_tensor`` from it."""
        sent, received = self._rows(input_sizes, input_tensor), self._rows(output_sizes, output_tensor)
        self._like(input_tensor, output_tensor, output_tensor.numel())
        kind = self._dtype(input_tensor)
        self._run("HcclAlltoAllV", stream, input_tensor, *sent, kind, output_tensor, *received, kind)

    def send(self, tensor: torch.Tensor, dst: int, stream: Stream = None) -> None:
        """``tensor`` to rank ``dst``, which calls ``recv``."""
        self._run("HcclSend", stream, tensor, tensor.numel(), self._dtype(tensor), dst)

    def recv(self, tensor: torch.Tensor, src: int, stream: Stream = None) -> None:
        """What rank ``src`` sends, into ``tensor``."""
        self._run("HcclRecv", stream, tensor, tensor.numel(), self._dtype(tensor), src)

    def group_start(self) -> None:
        """Hold this thread's calls back until ``group_end``, to be carried out together: sends both ways, for example."""
        self._open()
        self.library.call("HcclGroupStart")

    def group_end(self) -> None:
        """Carry out what has been called since ``group_start``."""
        self.library.call("HcclGroupEnd")

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """``group_start`` and ``group_end`` around a block."""
        self.group_start()
        try:
            yield
        finally:
            self.group_end()

    def destroy(self) -> None:
        """End the communicator once the NPU is done with it; a second call does nothing. Graphs that captured it are void."""
        comm, self._comm = self._comm, None
        if comm is not None:
            with torch.npu.device(self.device):
                torch.npu.synchronize()
                self.library.call("HcclCommDestroy", comm)

    def _open(self) -> int:
        if self._comm is None:
            raise RuntimeError("this PyHcclCommunicator was destroyed; make another")
        return self._comm

    def _run(self, name: str, stream: Stream, *arguments: Any) -> None:
        comm = self._open()
        for each in arguments:
            if isinstance(each, torch.Tensor):
                if each.device != self.device:
                    raise ValueError(f"this PyHcclCommunicator is of {self.device}; a tensor is on {each.device}")
                if not each.is_contiguous():
                    raise ValueError(f"HCCL takes contiguous tensors; {list(each.shape)} has strides {each.stride()}")
        # To read a stream's handle empties torch_npu's queue, in which the operators may still be that write the tensors.
        handle = (torch.npu.current_stream(self.device) if stream is None else stream).npu_stream
        plain = (each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
        self.library.call(name, *plain, comm, handle)

    @staticmethod
    def _dtype(tensor: torch.Tensor) -> int:
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise ValueError(f"HCCL does not take {str(tensor.dtype).removeprefix('torch.')}; it takes {names}")
        return DTYPES[tensor.dtype]

    def _reduction(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> tuple[int, int]:
        if op not in OPERATIONS:
            raise ValueError(f"HCCL does not reduce by {op}; it takes SUM, PRODUCT, MAX and MIN")
        return self._dtype(tensor), OPERATIONS[op]

    @staticmethod
    def _like(tensor: torch.Tensor, other: torch.Tensor, elements: int) -> None:
        if other.dtype != tensor.dtype or other.numel() != elements:
            raise ValueError(f"{elements} elements of {tensor.dtype} are needed; found {other.numel()} of {other.dtype}")

    def _rows(self, sizes: list[int], tensor: torch.Tensor) -> tuple[Any, Any]:
        """Elements of each rank's rows of a tensor and where they begin, as C arrays of uint64."""
        if len(sizes) != self.world_size or sum(sizes) != len(tensor):
            raise ValueError(
                f"sizes {sizes} are {len(sizes)} and {sum(sizes)} rows together; there are {self.world_size} ranks and "
                f"{len(tensor)} rows"
            )
        width, array = tensor[:1].numel() if len(tensor) else 0, ctypes.c_uint64 * self.world_size
        counts = [size * width for size in sizes]
        return array(*counts), array(*itertools.accumulate([0, *counts[:-1]]))
