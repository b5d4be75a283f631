# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Point-to-point HCCL link with bounded waits, on a private stream, for peers that may fail.

A call whose peer has failed blocks its stream, and with it every synchronization of the device. So
the calls are queued on a private stream that is destroyed with the link. Streams of torch_npu
are reused. Functions and constants are those of Huawei's public API reference
"acl API (C)" (aclrtCreateStream, aclrtSynchronizeStreamWithTimeout, aclrtDestroyStreamForce).
"""

import ctypes
from typing import Any

import torch

from ascend_communicator.pyhccl import ROOT_INFO_BYTES, HCCLError, PyHcclCommunicator, load

TIMED_OUT = 507046
"""ACL_ERROR_RT_STREAM_SYNC_TIMEOUT."""


class P2PLink(PyHcclCommunicator):
    """A communicator of two ranks. ``send`` and ``recv`` use the link's private stream unless
    another is given.

    A tensor must be complete before ``send``, and is complete after ``recv`` once :meth:`wait` has
    returned True.

    Args:
        rank: 0 or 1, on the current NPU.
        info: :meth:`root_info` of rank 0. HCCL does not verify it, so it must come from a trusted
            peer.

    Raises:
        ValueError: ``info`` has another length.
        HCCLError: HCCL cannot connect the ranks within ``HCCL_CONNECT_TIMEOUT``, or the NPU has no
            stream left.
    """

    def __init__(self, rank: int, info: bytes) -> None:
        self.library, self.rank, self.world_size = load(), rank, 2
        self.device = torch.device("npu", torch.npu.current_device())
        self._runtime, self._comm = ctypes.CDLL("libascendcl.so"), None
        root_info = torch.frombuffer(bytearray(info), dtype=torch.uint8)
        comm = ctypes.c_void_p()
        handle = ctypes.c_void_p()
        if len(root_info) != ROOT_INFO_BYTES:
            raise ValueError(
                f"HCCL's root information has {ROOT_INFO_BYTES} bytes; found {len(root_info)}"
            )
        self.library.call("HcclCommInitRootInfo", 2, root_info.data_ptr(), rank, ctypes.byref(comm))
        try:
            self._check("aclrtCreateStream", ctypes.byref(handle))
        except HCCLError:
            self.library.call("HcclCommDestroy", comm)
            raise
        self._comm = comm.value
        # PyHcclCommunicator reads only this attribute of a stream.
        self.npu_stream = handle.value

    @staticmethod
    def root_info() -> bytes:
        """Create HCCL's root information for both ranks, in the process of rank 0 on its current
        NPU.

        Raises:
            HCCLError: HCCL finds no network address, for example.
        """
        torch.npu.current_stream().synchronize()  # opens the NPU
        info = torch.zeros(ROOT_INFO_BYTES, dtype=torch.uint8)
        load().call("HcclGetRootInfo", info.data_ptr())
        return info.numpy().tobytes()

    def send(self, tensor: torch.Tensor, dst: int | None = None, stream: Any = None) -> None:
        """Send ``tensor`` to the peer."""
        super().send(tensor, 1 - self.rank if dst is None else dst, stream or self)

    def recv(self, tensor: torch.Tensor, src: int | None = None, stream: Any = None) -> None:
        """Receive ``tensor`` from the peer."""
        super().recv(tensor, 1 - self.rank if src is None else src, stream or self)

    def wait(self, seconds: float) -> bool:
        """Wait for all queued calls; returns whether they have completed within ``seconds``.

        Raises:
            HCCLError: a call has failed.
        """
        status = self._runtime.aclrtSynchronizeStreamWithTimeout(
            ctypes.c_void_p(self.npu_stream), max(1, int(seconds * 1000))
        )
        if status not in (0, TIMED_OUT):
            raise HCCLError(
                f"a point-to-point transfer failed with {status}; the peer has exited or refused"
            )
        return not status

    def destroy(self) -> None:
        """Destroy the link and its stream, including pending calls; idempotent.

        Memory of pending calls may be reused afterwards.
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
