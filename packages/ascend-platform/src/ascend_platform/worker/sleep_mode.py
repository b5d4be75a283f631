"""Sleep mode in PyTorch: frees the NPU memory of weights and KV cache while an engine is idle.

vLLM's backend needs a compiled allocator that unmaps the memory of tensors. Here the tensors' storages are resized to 0 and
back, so that all tensors of a storage (views, tied weights, split keys and values) are restored with it. Addresses change:
graphs are freed, and captured again when all tags are awake.
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
    """A freed storage, with a host copy of its contents if they are kept."""

    storage: torch.UntypedStorage
    size: int
    host_copy: torch.Tensor | None

    @classmethod
    def free(cls, tensor: torch.Tensor, keep: bool) -> _Storage:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        host_copy = None
        if keep:
            host_copy = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host_copy.copy_(_as_bytes(storage))
        storage.resize_(0)
        return cls(storage, size, host_copy)

    def restore(self) -> None:
        self.storage.resize_(self.size)
        data = _as_bytes(self.storage)
        data.zero_() if self.host_copy is None else data.copy_(self.host_copy, non_blocking=True)


class _Formatted(NamedTuple):
    """A freed tensor in a private format of CANN. torch_npu cannot resize its storage, so its data is replaced."""

    tensor: torch.Tensor
    format: int
    shape: torch.Size
    host_copy: torch.Tensor | None

    @classmethod
    def free(cls, tensor: torch.Tensor, keep: bool) -> _Formatted:
        freed = cls(tensor, torch_npu.get_npu_format(tensor), tensor.shape, tensor.cpu() if keep else None)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return freed

    def restore(self) -> None:
        like: dict[str, Any] = {"dtype": self.tensor.dtype, "device": self.tensor.device}
        data = torch.zeros(self.shape, **like) if self.host_copy is None else self.host_copy.to(**like)
        self.tensor.data = torch_npu.npu_format_cast(data, self.format)


class StorageBackend(SleepModeBackend):
    """Sleep mode backend of a worker (``vllm/device_allocator/sleep_mode_backend.py``)."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._freed: dict[str, list[_Storage | _Formatted]] = {}

    def suspend(self, level: int = 1) -> None:
        """Free weights and KV cache; at level 1 the weights are kept on the host."""
        self._free("weights", keep=level == 1)
        self._free("kv_cache", keep=False)
        torch.npu.empty_cache()
        self._state = "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of these tags without keeping its contents.

        Raises:
            ValueError: a tag is neither ``weights`` nor ``kv_cache``.
        """
        for tag in _check_tags(tags):
            self._free(tag, keep=False)
        torch.npu.empty_cache()
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Restore the memory of these tags, or of all: weights from the host copy or zeros, the KV cache zeros.

        Raises:
            ValueError: a tag is neither ``weights`` nor ``kv_cache``.
            torch.OutOfMemoryError: the memory is in use; a later call restores the rest.
        """
        self._state = "RESUMING"
        for tag in _check_tags(tags or TAGS):
            freed = self._freed.get(tag, [])
            while freed:
                freed[-1].restore()
                freed.pop()
            self._freed.pop(tag, None)
        torch.npu.synchronize()
        if self._freed:
            self._state = "SUSPENDED"
            return
        self._worker.model_runner.capture_model()
        self._state = "RUNNING"
        notify_awake(True)

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    def _free(self, tag: str, keep: bool) -> None:
        if tag in self._freed:
            return
        notify_awake(False)
        torch.npu.synchronize()
        self._worker.model_runner.free_graphs()
        found: dict[int, torch.Tensor] = {}
        for tensor in self._tensors(tag):
            if tensor.device.type == "npu" and tensor.untyped_storage().nbytes():
                found.setdefault(tensor.untyped_storage()._cdata, tensor)
        self._freed[tag] = [_kind(tensor).free(tensor, keep) for tensor in found.values()]

    def _tensors(self, tag: str) -> Iterator[torch.Tensor]:
        runner = self._worker.model_runner
        if tag == "kv_cache":
            yield from runner.kv_caches
            return
        for model in filter(None, (runner.get_model(), self._worker.get_draft_model())):
            for module in model.modules():
                yield from module.parameters(recurse=False)
                yield from module.buffers(recurse=False)
                # tensors that a layer derived from its weights after loading, but not its KV cache
                yield from (value for name, value in vars(module).items() if name != "kv_cache" and torch.is_tensor(value))


def notify_awake(state: bool) -> None:
    """Call the function offered for ``worker.awake``: True once weights and graphs are ready, False before they are freed."""
    if offered := extension.offered("worker.awake"):
        resolve_obj_by_qualname(offered)(state)


def _check_tags(tags: tuple[str, ...] | list[str]) -> tuple[str, ...] | list[str]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ValueError(f"unknown sleep mode tag {unknown[0]!r}; supported: {', '.join(TAGS)}")
    return tags


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _kind(tensor: torch.Tensor) -> type[_Storage] | type[_Formatted]:
    base_formats = (0, 2, 27, 30)  # NCHW, ND, NCL and NCDHW
    return _Storage if int(torch_npu.get_npu_format(tensor)) in base_formats else _Formatted
