"""A model's tensors as a row of bytes that is cut into pieces, read from an NPU and written to it through pinned memory."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import blake3
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ascend_model_loader.wire import PeerError

PIECE = 1 << 22
"""Bytes of a piece: few enough to stay in a processor's cache between the network, the checksum and the copy."""

CHECKSUMS: Mapping[str, Callable[[memoryview], bytes]] = {
    "xxh3": lambda data: xxhash.xxh3_128_digest(data),
    "blake3": lambda data: blake3.blake3(data).digest(),
}
"""Of a piece. BLAKE3 cannot be met on purpose; xxh3 finds what chance has changed, in a tenth of the time."""

Described = list[tuple[str, str, list[int]]]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
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


def describe(tensors: Mapping[str, torch.Tensor]) -> Described:
    """Names, dtypes and shapes, as a manifest has them."""
    return [(name, str(each.dtype).removeprefix("torch."), [*each.shape]) for name, each in tensors.items()]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in the order of its elements, so that pieces of it can be copied."""
    if not tensor.is_contiguous():
        return False
    if tensor.device.type != "npu":
        return True
    import torch_npu

    return int(torch_npu.get_npu_format(tensor)) in (-1, 0, 2, 27, 30)  # not defined, NCHW, ND, NCL and NCDHW


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as ``uint8 [bytes]``, in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def staging(device: torch.device, size: int = PIECE) -> torch.Tensor:
    """Host memory of a piece, ``uint8``, pinned where that matters."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "npu")


def view(buffer: torch.Tensor) -> memoryview:
    """The bytes of host memory."""
    return memoryview(cast(Any, buffer.numpy()))


class Layout:
    """Which bytes of which tensors a piece has.

    Args:
        sizes: bytes of each tensor.
        piece: bytes of a piece.
    """

    def __init__(self, sizes: Sequence[int], piece: int = PIECE) -> None:
        self.ends = [*itertools.accumulate(sizes)]
        self.begins = [0, *self.ends[:-1]]
        self.piece = piece
        self.total = self.ends[-1] if self.ends else 0
        self.count = -(-self.total // piece)

    def size(self, index: int) -> int:
        return min(self.piece, self.total - index * self.piece)

    def parts(self, index: int) -> Iterator[tuple[int, slice, slice]]:
        """The tensor's number, its bytes, and the piece's bytes, for each tensor of a piece."""
        at, end = index * self.piece, index * self.piece + self.size(index)
        number = bisect.bisect_right(self.ends, at)
        while at < end:
            stop = min(end, self.ends[number])
            begin = self.begins[number]
            if at < stop:
                first = index * self.piece
                yield number, slice(at - begin, stop - begin), slice(at - first, stop - first)
            at, number = stop, number + 1


def layout_of(tensors: Mapping[str, torch.Tensor], piece: int = PIECE) -> Layout:
    return Layout([each.numel() * each.element_size() for each in tensors.values()], piece)


def own_stream(device: torch.device) -> None:
    """Give this thread a stream of its own on an NPU: a copy waits for what is before it on its thread's stream."""
    if device.type == "npu":
        torch.npu.set_device(device)
        torch.npu.set_stream(torch.npu.Stream(device))


def settle(memory: torch.Tensor) -> None:
    """Wait for this thread's copies from one place of an NPU to another, which are the ones that nobody else waits for."""
    if memory.device.type == "npu":
        torch.npu.current_stream(memory.device).synchronize()


class Copier:
    """Copies pieces between plain tensors and other memory. Each copy is over when its method returns."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [bytes_of(each) for each in tensors]
        self.layout = Layout([each.numel() for each in self._tensors])

    def read(self, index: int, into: torch.Tensor) -> torch.Tensor:
        """A piece, at the beginning of ``into``."""
        for number, theirs, ours in self.layout.parts(index):
            into[ours].copy_(self._tensors[number][theirs])
        settle(into)
        return into[: self.layout.size(index)]

    def write(self, index: int, piece: torch.Tensor) -> None:
        """Put a piece into the tensors."""
        for number, theirs, ours in self.layout.parts(index):
            self._tensors[number][theirs].copy_(piece[ours])
        settle(piece)


def digests(tensors: Mapping[str, torch.Tensor], checksum: str, device: torch.device) -> list[bytes]:
    """The checksum of each piece of plain tensors."""
    copier, buffer, hashed = Copier(tensors.values()), staging(device), CHECKSUMS[checksum]
    return [hashed(view(copier.read(index, buffer))) for index in range(copier.layout.count)]
