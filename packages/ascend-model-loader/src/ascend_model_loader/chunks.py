"""A model's tensors as a row of bytes that is cut into chunks, read from an NPU and written to it through pinned memory."""

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
"""Bytes of a chunk: few enough to stay in a processor's cache between the network, the checksum and the copy."""

CHECKSUMS: Mapping[str, Callable[[memoryview], bytes]] = {
    "xxh3": lambda data: xxhash.xxh3_128_digest(data),
    "blake3": lambda data: blake3.blake3(data).digest(),
}
"""Of a chunk. BLAKE3 cannot be met on purpose; xxh3 finds what chance has changed, in a tenth of the time."""

TensorSpecs = list[tuple[str, str, list[int]]]


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers, of tied ones the first.

    Raises:
        PeerError: some have no bytes of their own, as with weights that are quantized while they are loaded.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not torch.is_tensor(tensor) or id(tensor) in seen:
            continue
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
            raise PeerError(f"{name} is a {type(tensor).__name__} on {tensor.device.type}, which cannot be sent as bytes")
        seen.add(id(tensor))
        found[name] = tensor
    return found


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> TensorSpecs:
    """Names, dtypes and shapes, as a manifest has them."""
    return [(name, str(each.dtype).removeprefix("torch."), [*each.shape]) for name, each in tensors.items()]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in the order of its elements, so that chunks of it can be copied."""
    if not tensor.is_contiguous():
        return False
    if tensor.device.type != "npu":
        return True
    import torch_npu

    return int(torch_npu.get_npu_format(tensor)) in (-1, 0, 2, 27, 30)  # not defined, NCHW, ND, NCL and NCDHW


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as ``uint8 [bytes]``, in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def staging_buffer(device: torch.device, size: int = CHUNK_BYTES) -> torch.Tensor:
    """Host memory of a chunk, ``uint8``, pinned where that matters."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "npu")


def host_bytes(buffer: torch.Tensor) -> memoryview:
    """The bytes of host memory."""
    return memoryview(cast(Any, buffer.numpy()))


class ChunkLayout:
    """Which bytes of which tensors a chunk has.

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
        """The tensor's number, its bytes, and the chunk's bytes, for each tensor of a chunk."""
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
    """Give this thread a stream of its own on an NPU: a copy waits for what is before it on its thread's stream."""
    if device.type == "npu":
        torch.npu.set_device(device)
        torch.npu.set_stream(torch.npu.Stream(device))


def synchronize(memory: torch.Tensor) -> None:
    """Wait for this thread's copies from one place of an NPU to another, which are the ones that nobody else waits for."""
    if memory.device.type == "npu":
        torch.npu.current_stream(memory.device).synchronize()


class ChunkCopier:
    """Copies chunks between plain tensors and other memory. Each copy is over when its method returns."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [byte_view(each) for each in tensors]
        self.layout = ChunkLayout([each.numel() for each in self._tensors])

    def read(self, index: int, into: torch.Tensor) -> torch.Tensor:
        """A chunk, at the beginning of ``into``."""
        for number, theirs, ours in self.layout.slices(index):
            into[ours].copy_(self._tensors[number][theirs])
        synchronize(into)
        return into[: self.layout.size(index)]

    def write(self, index: int, chunk: torch.Tensor) -> None:
        """Put a chunk into the tensors."""
        for number, theirs, ours in self.layout.slices(index):
            self._tensors[number][theirs].copy_(chunk[ours])
        synchronize(chunk)


def chunk_digests(tensors: Mapping[str, torch.Tensor], checksum: str, device: torch.device) -> list[bytes]:
    """The checksum of each chunk of plain tensors."""
    copier, buffer, hashed = ChunkCopier(tensors.values()), staging_buffer(device), CHECKSUMS[checksum]
    return [hashed(host_bytes(copier.read(index, buffer))) for index in range(copier.layout.count)]
