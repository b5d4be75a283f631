"""Sleep mode: NPU memory of weights and KV cache given back while an engine idles, in PyTorch alone.

vLLM's own backend needs a compiled allocator that unmaps memory behind tensors. Here the tensors' storages are resized to
nothing and back: every tensor that shares a storage (views, tied weights, keys and values taken apart) comes back with it.
Addresses change: graphs are dropped, with their memory, and captured again once all tags are awake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch_npu
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import extension

TAGS = ("weights", "kv_cache")


class _Storage(NamedTuple):
    """A storage that is asleep, and what it held, on the host, if that is kept."""

    storage: torch.UntypedStorage
    size: int
    kept: torch.Tensor | None

    @classmethod
    def take(cls, tensor: torch.Tensor, keep: bool) -> _Storage:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        kept = None
        if keep:
            kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            kept.copy_(_bytes_of(storage))
        storage.resize_(0)
        return cls(storage, size, kept)

    def restore(self) -> None:
        self.storage.resize_(self.size)
        room = _bytes_of(self.storage)
        room.zero_() if self.kept is None else room.copy_(self.kept, non_blocking=True)


class _Formatted(NamedTuple):
    """A tensor in a private format of CANN, whose storage cannot be resized (torch_npu): its data are replaced."""

    tensor: torch.Tensor
    format: int
    shape: torch.Size
    kept: torch.Tensor | None

    @classmethod
    def take(cls, tensor: torch.Tensor, keep: bool) -> _Formatted:
        asleep = cls(tensor, torch_npu.get_npu_format(tensor), tensor.shape, tensor.cpu() if keep else None)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return asleep

    def restore(self) -> None:
        like: dict[str, Any] = {"dtype": self.tensor.dtype, "device": self.tensor.device}
        plain = torch.zeros(self.shape, **like) if self.kept is None else self.kept.to(**like)
        self.tensor.data = torch_npu.npu_format_cast(plain, self.format)


class StorageBackend(SleepModeBackend):
    """vLLM's sleep-mode backend for a worker (``vllm/device_allocator/sleep_mode_backend.py``)."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._asleep: dict[str, list[_Storage | _Formatted]] = {}

    def suspend(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache; at level 1 the weights are kept on the host."""
        self._take("weights", keep=level == 1)
        self._take("kv_cache", keep=False)
        torch.npu.empty_cache()
        self._state = "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give back the memory of these tags; what it held is lost.

        Raises:
            ValueError: a tag that is neither ``weights`` nor ``kv_cache``.
        """
        for tag in _checked(tags):
            self._take(tag, keep=False)
        torch.npu.empty_cache()
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Take the memory of these tags again, of all without any: weights as they were, or zeros; the KV cache zeros.

        Raises:
            ValueError: a tag that is neither ``weights`` nor ``kv_cache``.
            torch.OutOfMemoryError: somebody else has the memory now; what has not come back can be asked for again.
        """
        self._state = "RESUMING"
        for tag in _checked(tags or TAGS):
            asleep = self._asleep.get(tag, [])
            while asleep:
                asleep[-1].restore()
                asleep.pop()
            self._asleep.pop(tag, None)
        torch.npu.synchronize()
        if self._asleep:
            self._state = "SUSPENDED"
            return
        self._worker.model_runner.capture_model()
        self._state = "RUNNING"
        notify_awake(True)

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    def _take(self, tag: str, keep: bool) -> None:
        if tag in self._asleep:
            return
        notify_awake(False)
        torch.npu.synchronize()
        self._worker.model_runner.free_graphs()
        found: dict[int, torch.Tensor] = {}
        for tensor in self._tensors(tag):
            if tensor.device.type == "npu" and tensor.untyped_storage().nbytes():
                found.setdefault(tensor.untyped_storage()._cdata, tensor)
        self._asleep[tag] = [(_Storage if _plain(tensor) else _Formatted).take(tensor, keep) for tensor in found.values()]

    def _tensors(self, tag: str) -> Iterator[torch.Tensor]:
        runner = self._worker.model_runner
        if tag == "kv_cache":
            yield from runner.kv_caches
            return
        for model in filter(None, (runner.get_model(), self._worker.get_draft_model())):
            for module in model.modules():
                yield from module.parameters(recurse=False)
                yield from module.buffers(recurse=False)
                # what layers derive from their weights after loading; a layer's KV cache is not one of them
                yield from (value for name, value in vars(module).items() if name != "kv_cache" and torch.is_tensor(value))


def notify_awake(state: bool) -> None:
    """Tell the component that offers ``worker.awake`` that the weights are there and graphs captured, or soon are not."""
    if offered := extension.offered("worker.awake"):
        resolve_obj_by_qualname(offered)(state)


def _checked(tags: tuple[str, ...] | list[str]) -> tuple[str, ...] | list[str]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ValueError(f"sleep mode has no tag {unknown[0]!r}; known: {', '.join(TAGS)}")
    return tags


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _plain(tensor: torch.Tensor) -> bool:
    return int(torch_npu.get_npu_format(tensor)) in (0, 2, 27, 30)  # NCHW, ND, NCL and NCDHW
