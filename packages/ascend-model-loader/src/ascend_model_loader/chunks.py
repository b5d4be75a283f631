# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Chunks of a model's weights: fixed-size slices of all tensors' bytes, copied to and from an NPU
through pinned memory."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import blake3
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ascend_model_loader.wire import PeerError

CHUNK_BYTES = 1 << 22
"""Bytes of a chunk: small enough to stay in a CPU cache between socket, checksum and copy."""

CHECKSUMS: Mapping[str, Callable[[memoryview], bytes]] = {
    "xxh3": xxhash.xxh3_128_digest,
    "blake3": lambda data: blake3.blake3(data).digest(),
}
"""Checksum functions by name. BLAKE3 is collision resistant; xxh3 detects accidental changes, in a
tenth of the time."""

TensorSpecs = list[tuple[str, str, list[int]]]


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first.

    Raises:
        PeerError: a tensor has no bytes of its own, such as weights that are quantized during
            loading.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not torch.is_tensor(tensor) or id(tensor) in seen:
            continue
        if (
            tensor.is_meta
            or torch.nn.parameter.is_lazy(tensor)
            or is_traceable_wrapper_subclass(tensor)
        ):
            raise PeerError(
                f"{name} is a {type(tensor).__name__} on {tensor.device.type}, which cannot be sent"
                " as bytes"
            )
        seen.add(id(tensor))
        tensors[name] = tensor
    return tensors


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> TensorSpecs:
    """(name, dtype, shape) of each tensor, as in a manifest."""
    return [
        (name, str(each.dtype).removeprefix("torch."), [*each.shape])
        for name, each in tensors.items()
    ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous and in a base NPU format, so that chunks of it can be copied
    as bytes."""
    if not tensor.is_contiguous():
        return False
    if tensor.device.type != "npu":
        return True
    import torch_npu

    # Undefined, NCHW, ND, NCL and NCDHW.
    return int(torch_npu.get_npu_format(tensor)) in (-1, 0, 2, 27, 30)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """View of a plain tensor as ``uint8 [bytes]``."""
    return tensor.detach().view(-1).view(torch.uint8)


def staging_buffer(device: torch.device, size: int = CHUNK_BYTES) -> torch.Tensor:
    """Host buffer of one chunk, ``uint8``; pinned if the device is an NPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "npu")


def host_bytes(buffer: torch.Tensor) -> memoryview:
    """Memory view of a host tensor."""
    return memoryview(cast(Any, buffer.numpy()))


class ChunkLayout:
    """Mapping from chunks to byte ranges of tensors.

    Args:
        sizes: bytes of each tensor.
        chunk: bytes of a chunk.
    """

    def __init__(self, sizes: Sequence[int], chunk: int = CHUNK_BYTES) -> None:
        self.ends = [*itertools.accumulate(sizes)]
        self.begins = [0, *self.ends[:-1]]
        self.chunk = chunk
        self.total = self.ends[-1] if self.ends else 0
        self.count = -(-self.total // chunk)

    def size(self, index: int) -> int:
        return min(self.chunk, self.total - index * self.chunk)

    def slices(self, index: int) -> Iterator[tuple[int, slice, slice]]:
        """Per tensor in the chunk: its index, the byte range in the tensor, and the byte range in
        the chunk."""
        at, end = index * self.chunk, index * self.chunk + self.size(index)
        number = bisect.bisect_right(self.ends, at)
        while at < end:
            stop = min(end, self.ends[number])
            begin = self.begins[number]
            if at < stop:
                first = index * self.chunk
                yield number, slice(at - begin, stop - begin), slice(at - first, stop - first)
            at, number = stop, number + 1


def chunk_layout(tensors: Mapping[str, torch.Tensor], chunk: int = CHUNK_BYTES) -> ChunkLayout:
    return ChunkLayout([each.numel() * each.element_size() for each in tensors.values()], chunk)


def use_private_stream(device: torch.device) -> None:
    """Give this thread its own NPU stream, so that its copies do not wait for work on the default
    stream."""
    if device.type == "npu":
        torch.npu.set_device(device)
        torch.npu.set_stream(torch.npu.Stream(device))


def synchronize(memory: torch.Tensor) -> None:
    """Wait for this thread's device-to-device copies; copies to and from the host have already
    completed."""
    if memory.device.type == "npu":
        torch.npu.current_stream(memory.device).synchronize()


class ChunkCopier:
    """Copies chunks between plain tensors and other memory. A copy has completed when its method
    returns."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [byte_view(each) for each in tensors]
        self.layout = ChunkLayout([each.numel() for each in self._tensors])

    def read(self, index: int, into: torch.Tensor) -> torch.Tensor:
        """Copy a chunk to the beginning of ``into``."""
        for number, theirs, ours in self.layout.slices(index):
            into[ours].copy_(self._tensors[number][theirs])
        synchronize(into)
        return into[: self.layout.size(index)]

    def write(self, index: int, chunk: torch.Tensor) -> None:
        """Copy a chunk into the tensors."""
        for number, theirs, ours in self.layout.slices(index):
            self._tensors[number][theirs].copy_(chunk[ours])
        synchronize(chunk)


def chunk_digests(
    tensors: Mapping[str, torch.Tensor], checksum: str, device: torch.device
) -> list[bytes]:
    """Checksum of each chunk of plain tensors."""
    copier, buffer = ChunkCopier(tensors.values()), staging_buffer(device)
    hashed = CHECKSUMS[checksum]
    return [hashed(host_bytes(copier.read(index, buffer))) for index in range(copier.layout.count)]
