"""HCCL between two ranks that may die at any time: a stream of its own, on which every wait has an end.

A call whose peer has died stays on its stream, and whoever waits for the NPU as a whole waits for that stream too. So the calls
are not put on one of torch_npu's, which are used again, but on one that ends with the link. Functions and numbers are those of
Huawei's public API reference "acl API (C)" (aclrtCreateStream, aclrtSynchronizeStreamWithTimeout, aclrtDestroyStreamForce).
"""

import ctypes
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup

from ascend_communicator.pyhccl import HCCLError, PyHcclCommunicator

TIMED_OUT = 507046
"""ACL_ERROR_RT_STREAM_SYNC_TIMEOUT."""


class Link(PyHcclCommunicator):
    """A communicator of two ranks whose ``send`` and ``recv`` go on the link's own stream, unless another is given.

    What a tensor holds must be written, and what is received can be read, outside of this stream: see :meth:`wait`.
    """

    def __init__(self, group: StatelessProcessGroup, device: int) -> None:
        super().__init__(group, device)
        self._runtime = ctypes.CDLL("libascendcl.so")
        handle = ctypes.c_void_p()
        self._check("aclrtCreateStream", ctypes.byref(handle))
        self.npu_stream = handle.value  # PyHcclCommunicator asks a stream for no more than this

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


def connect(address: str, port: int, rank: int, seconds: int = 300) -> Link:
    """Join one other rank, of another engine, on the current NPU; the arguments and errors are those of ``pyhccl.connect``."""
    group = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=2, store_timeout=seconds)
    return Link(group, torch.npu.current_device())
