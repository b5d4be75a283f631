# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Device memory whose physical pages are freed and mapped again at the same addresses, for sleep
mode.

Tensors are allocated from memory pools of torch_npu's caching allocator, which gets its segments
here: CANN reserves an address range for each and maps physical memory to it. The functions are
those of CANN's runtime, as torch_npu's expandable segments use them
(``torch_npu/csrc/core/npu/NPUCachingAllocator.cpp``); torch_npu itself offers no way to unmap
memory of a live tensor.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu

from ascend_platform.observability import metrics

PAGE = 2 << 20
"""Granularity of physical memory in bytes ("only 2 MB is supported",
aclrtMemGetAllocationGranularity)."""

OUT_OF_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION
TO_DEVICE, TO_HOST = 1, 2  # aclrtMemcpyKind

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class _PhysicalMemoryProperties(ctypes.Structure):
    """aclrtPhysicalMemProp of torch_npu's ``acl/acl_rt.h``."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location", _Location),
        ("reserve", ctypes.c_uint64),
    )


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_ARGUMENTS = {
    "aclrtReserveMemAddress": (ctypes.POINTER(_POINTER), _SIZE, _SIZE, _POINTER, ctypes.c_uint64),
    "aclrtReleaseMemAddress": (_POINTER,),
    "aclrtMallocPhysical": (
        ctypes.POINTER(_POINTER),
        _SIZE,
        ctypes.POINTER(_PhysicalMemoryProperties),
        ctypes.c_uint64,
    ),
    "aclrtFreePhysical": (_POINTER,),
    "aclrtMapMem": (_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_uint64),
    "aclrtUnmapMem": (_POINTER,),
    "aclrtMemcpy": (_POINTER, _SIZE, _POINTER, _SIZE, ctypes.c_int),
    "aclrtMemset": (_POINTER, _SIZE, ctypes.c_int32, _SIZE),
}


def _call(name: str, *arguments: Any) -> None:
    """Call a function of CANN's runtime.

    Raises:
        torch.OutOfMemoryError: the NPU has too little free memory.
        RuntimeError: another error, by its number.
    """
    function = getattr(ctypes.CDLL("libascendcl.so"), name)
    function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
    if error := function(*arguments):
        raise (torch.OutOfMemoryError if error == OUT_OF_MEMORY else RuntimeError)(
            f"{name} failed with error {error}"
        )


class Segment:
    """A segment of the caching allocator: an address range, mapped to physical memory or not."""

    def __init__(self, size: int, device: int, tag: str) -> None:
        self.size, self.device, self.tag = -(-size // PAGE) * PAGE, device, tag
        self.handle: ctypes.c_void_p | None = None
        # Address, bytes and host copy of memory that is kept while asleep.
        self.kept: list[tuple[int, int, torch.Tensor]] = []
        address = _POINTER()
        _call("aclrtReserveMemAddress", ctypes.byref(address), self.size, 0, None, 0)
        assert address.value is not None
        self.address = address.value
        try:
            self.map()
        except Exception:
            _call("aclrtReleaseMemAddress", self.address)
            raise

    def map(self) -> None:
        handle, huge_pages = _POINTER(), 4  # ACL_HBM_MEM_HUGE
        properties = _PhysicalMemoryProperties(0, 0, huge_pages, _Location(self.device, 1), 0)
        _call("aclrtMallocPhysical", ctypes.byref(handle), self.size, ctypes.byref(properties), 0)
        try:
            _call("aclrtMapMem", self.address, self.size, 0, handle, 0)
        except Exception:
            _call("aclrtFreePhysical", handle)
            raise
        self.handle = handle

    def unmap(self) -> None:
        if self.handle is not None:
            _call("aclrtUnmapMem", self.address)
            _call("aclrtFreePhysical", self.handle)
            self.handle = None

    def keep(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Copy these blocks, each an address and its size in bytes, to the host."""
        for address, size in blocks:
            copy = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            _call("aclrtMemcpy", copy.data_ptr(), size, address, size, TO_HOST)
            self.kept.append((address, size, copy))

    def restore(self) -> None:
        """Map physical memory again: the kept blocks, and zeros elsewhere."""
        self.map()
        try:
            _call("aclrtMemset", self.address, self.size, 0, self.size)
            for address, size, copy in self.kept:
                _call("aclrtMemcpy", address, size, copy.data_ptr(), size, TO_DEVICE)
        except Exception:
            self.unmap()
            raise
        self.kept.clear()


class VirtualMemory:
    """The memory pools of an engine's sleep mode, by tag."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._pools: list[tuple[str, Any]] = []
        self._asleep: set[str] = set()
        self._tag = ""
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._release)
        pointers = [ctypes.cast(callback, _POINTER).value for callback in self._callbacks]
        self._allocator = torch_npu._C._npu_customAllocator(*pointers)
        _ALL.append(self)

    @contextmanager
    def pool(self, tag: str) -> Iterator[None]:
        """Allocate the tensors of this thread in a new pool."""
        pool = torch.npu.MemPool(self._allocator)
        self._pools.append((tag, pool))
        outer, self._tag = self._tag, tag
        try:
            with metrics.measuring, torch.npu.use_mem_pool(pool):
                yield
        finally:
            self._tag = outer
            self._trim(pool)

    def is_empty(self) -> bool:
        return not self._pools

    def keep(self, tag: str, discard: Iterable[torch.Tensor] | None) -> None:
        """Copy what is kept of a tag to the host, before :meth:`free`.

        Args:
            discard: tensors whose contents are not kept on the host; None: none are kept.
        """
        torch.npu.synchronize()
        discarded = None
        if discard is not None:
            discarded = {tensor.untyped_storage().data_ptr() for tensor in discard}
        for segment, found in self._found(tag):
            if segment.handle is not None:
                segment.keep(_blocks(found, discarded))

    def forget(self) -> None:
        """Undo :meth:`keep` for memory that is not freed."""
        for segment in self._segments.values():
            if segment.handle is not None:
                segment.kept.clear()

    def free(self, tag: str) -> None:
        """Free the physical memory of a tag; tensors keep their addresses and must not be used
        until :meth:`restore`."""
        self._asleep.add(tag)
        for segment, _ in self._found(tag):
            segment.unmap()

    def restore(self, tag: str) -> None:
        """Map memory of a tag again.

        Raises:
            torch.OutOfMemoryError: the NPU has too little free memory; a later call restores the
                rest.
        """
        if tag not in self._asleep:
            return
        for segment, found in self._found(tag):
            if segment.handle is None and found["allocated_size"]:
                segment.restore()
        self._asleep.remove(tag)

    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def close(self) -> None:
        """Give the pools back to the caching allocator, which frees them with their last tensor."""
        with metrics.measuring:
            self._pools.clear()

    def _found(self, tag: str) -> Iterator[tuple[Segment, Any]]:
        """The segments of a tag, with what the caching allocator knows of each."""
        for own, pool in self._pools:
            for found in pool.snapshot() if own == tag else ():
                yield self._segments[found["address"]], found

    def _trim(self, pool: Any) -> None:
        """Free the segments without tensors of a pool that is not allocated from any more."""
        torch.npu.synchronize()
        for found in pool.snapshot():
            if not found["allocated_size"]:
                self._segments[found["address"]].unmap()

    def _allocate(self, size: int, device: int, stream: int) -> int | None:
        try:
            segment = Segment(size, device, self._tag)
        except torch.OutOfMemoryError:
            # The caching allocator frees its cache, retries, and raises its own error.
            return None
        self._segments[segment.address] = segment
        return segment.address

    def _release(self, address: int, size: int, stream: int) -> None:
        segment = self._segments.pop(address)
        torch.npu.synchronize()
        segment.unmap()
        _call("aclrtReleaseMemAddress", address)


def _blocks(segment: Any, discarded: set[int] | None) -> Iterator[tuple[int, int]]:
    """Address and size of a segment's blocks in use that are not discarded."""
    for block in segment["blocks"]:
        if (
            discarded is not None
            and block["state"].startswith("active")
            and block["address"] not in discarded
        ):
            yield block["address"], block["size"]


_ALL: list[VirtualMemory] = []  # The callbacks must outlive the last tensor.


@atexit.register
def _close_all() -> None:
    """Free pools before the interpreter ends: their segments are freed by functions in Python."""
    for memory in _ALL:
        memory.close()
    gc.collect()
