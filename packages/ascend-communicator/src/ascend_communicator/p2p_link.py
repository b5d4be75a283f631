"""HCCL between two ranks that may die at any time: a stream of its own, on which every wait has an end.

A call whose peer has died stays on its stream, and whoever waits for the NPU as a whole waits for that stream too. So the calls
are not put on one of torch_npu's, which are used again, but on one that ends with the link. Functions and numbers are those of
Huawei's public API reference "acl API (C)" (aclrtCreateStream, aclrtSynchronizeStreamWithTimeout, aclrtDestroyStreamForce).
"""

import ctypes
from typing import Any

import torch

from ascend_communicator.pyhccl import ROOT_INFO_BYTES, HCCLError, PyHcclCommunicator, load

TIMED_OUT = 507046
"""ACL_ERROR_RT_STREAM_SYNC_TIMEOUT."""


class Link(PyHcclCommunicator):
    """A communicator of two ranks whose ``send`` and ``recv`` go on the link's own stream, unless another is given.

    What a tensor holds must be there before it is sent, and what is received is there once :meth:`wait` has said so.

    Args:
        rank: 0 or 1, on the current NPU.
        info: :meth:`root_info` of rank 0, however it came: HCCL believes it.

    Raises:
        ValueError: it has another length.
        HCCLError: the two cannot connect; HCCL waits for the other for as long as ``HCCL_CONNECT_TIMEOUT`` says.
    """

    def __init__(self, rank: int, info: bytes) -> None:
        self.library, self.rank, self.world_size = load(), rank, 2
        self.device = torch.device("npu", torch.npu.current_device())
        self._runtime, self._comm = ctypes.CDLL("libascendcl.so"), None
        given, comm, handle = torch.frombuffer(bytearray(info), dtype=torch.uint8), ctypes.c_void_p(), ctypes.c_void_p()
        if len(given) != ROOT_INFO_BYTES:
            raise ValueError(f"HCCL's root information has {ROOT_INFO_BYTES} bytes; found {len(given)}")
        self.library.call("HcclCommInitRootInfo", 2, given.data_ptr(), rank, ctypes.byref(comm))
        self._comm = comm.value
        self._check("aclrtCreateStream", ctypes.byref(handle))
        self.npu_stream = handle.value  # PyHcclCommunicator asks a stream for no more than this

    @staticmethod
    def root_info() -> bytes:
        """What both ranks are given, as made by the process of rank 0 on its current NPU.

        Raises:
            HCCLError: HCCL has no address to meet at, for example.
        """
        torch.npu.current_stream().synchronize()  # the NPU is open
        made = torch.zeros(ROOT_INFO_BYTES, dtype=torch.uint8)
        load().call("HcclGetRootInfo", made.data_ptr())
        return made.numpy().tobytes()

    def send(self, tensor: torch.Tensor, dst: int | None = None, stream: Any = None) -> None:
        """``tensor`` to the other rank."""
        super().send(tensor, 1 - self.rank if dst is None else dst, stream or self)

    def recv(self, tensor: torch.Tensor, src: int | None = None, stream: Any = None) -> None:
        """What the other rank sends, into ``tensor``."""
        super().recv(tensor, 1 - self.rank if src is None else src, stream or self)

    def wait(self, seconds: float) -> bool:
        """Whether all calls have been carried out in time.

        Raises:
            HCCLError: one has failed.
        """
        status = self._runtime.aclrtSynchronizeStreamWithTimeout(ctypes.c_void_p(self.npu_stream), max(1, int(seconds * 1000)))
        if status not in (0, TIMED_OUT):
            raise HCCLError(f"a call between two engines has failed with {status}; the other one has ended, or refuses")
        return not status

    def destroy(self) -> None:
        """End the link and its stream with all that is on it; a second call does nothing.

        The memory of calls that were not carried out can be used again.
        """
        comm, self._comm = self._comm, None
        if comm is None:
            return
        with torch.npu.device(self.device):
            try:
                self._check("aclrtDestroyStreamForce", ctypes.c_void_p(self.npu_stream))
            finally:
                self.library.call("HcclCommDestroy", comm)

    def _check(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._runtime, name)(*arguments):
            raise HCCLError(f"{name} failed with {status}")
