# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sleep mode in PyTorch: frees the NPU memory of weights and KV cache while an engine is idle.

vLLM's backend needs a compiled allocator that unmaps the memory of tensors. Here
``virtual_memory.py`` does, with CANN's functions: tensors keep their addresses, so that graphs stay
valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform.errors import RefusedError
from ascend_platform.plugins import slots
from ascend_platform.worker import process_groups
from ascend_platform.worker.virtual_memory import VirtualMemory

TAGS = ("weights", "kv_cache")


class VirtualMemoryBackend(SleepModeBackend):
    """Sleep mode backend of a worker (``vllm/device_allocator/sleep_mode_backend.py``)."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._memory = VirtualMemory()

    def pool(self, tag: str) -> AbstractContextManager[None]:
        """Context in which the tensors of a tag are allocated."""
        return self._memory.pool(tag)

    def suspend(self, level: int = 1) -> None:
        """Free weights and KV cache.

        At level 1 the weights are kept on the host. At level 2 the model's parameters are not;
        other tensors that were made with the model, such as rotary tables and the slots of LoRA
        adapters, are.

        Raises:
            RefusedError: sleep mode is not enabled, or memory is being read by others.
            RuntimeError: another rank's error; no memory is freed.
        """
        self._free({"weights": level != 1, "kv_cache": True})

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of these tags without keeping its contents, which are those of level 2.

        Raises:
            ValueError: a tag is neither ``weights`` nor ``kv_cache``.
        """
        self._free(dict.fromkeys(_check_tags(tags), True))

    def resume(self, tags: list[str] | None = None) -> None:
        """Restore the memory of these tags, or of all; what was not kept is 0.

        Raises:
            ValueError: a tag is neither ``weights`` nor ``kv_cache``.
            torch.OutOfMemoryError: the memory is in use; a later call restores the rest.
            RuntimeError: another rank's error.
        """
        chosen = _check_tags(tags or TAGS)
        self._state = "RESUMING"
        try:
            with process_groups.agreement():
                torch.npu.empty_cache()
                for tag in chosen:
                    self._memory.restore(tag)
        except Exception:
            self._state = "SUSPENDED"
            raise
        self._state = "SUSPENDED" if self._memory.is_asleep() else "RUNNING"
        if self._state == "RUNNING":
            notify_awake(True)

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return True

    def _free(self, discarded: dict[str, bool]) -> None:
        """Free these tags, and discard their contents or not, on all ranks or on none."""
        try:
            with process_groups.agreement():
                if self._memory.is_empty():
                    raise RefusedError("sleep mode is not enabled; fix: --enable-sleep-mode")
                notify_awake(False)
                for tag, discard in discarded.items():
                    parameters = self._parameters() if discard else ()
                    self._memory.keep(tag, parameters if tag == "weights" else None)
            with process_groups.agreement():
                for tag in discarded:
                    self._memory.free(tag)
                torch.npu.empty_cache()
        except Exception:
            self._memory.forget()
            # Contents that are discarded are lost, and the engine must not go on without them.
            if not (self._memory.is_asleep() and discarded.get("weights")):
                self.resume()
            raise
        self._state = "SUSPENDED"

    def _parameters(self) -> Iterator[torch.Tensor]:
        for model in filter(
            None, (self._worker.model_runner.get_model(), self._worker.get_draft_model())
        ):
            yield from model.parameters()


def notify_awake(state: bool) -> None:
    """Call what is offered for ``worker.awake`` and ``worker.awake.*``: True once weights and
    graphs are ready, False before they are freed."""
    for slot in ("worker.awake", *(f"worker.awake.{name}" for name in slots.names("worker.awake"))):
        if offered := slots.offered(slot):
            resolve_obj_by_qualname(offered)(state)


def _check_tags(tags: tuple[str, ...] | list[str]) -> tuple[str, ...] | list[str]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ValueError(f"unknown sleep mode tag {unknown[0]!r}; supported: {', '.join(TAGS)}")
    return tags
