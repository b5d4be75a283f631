# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inputs of a step, computed on the host and copied to the NPU at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_platform.runners.v1.kernels.slot_mapping import slots_of

ALIGNMENT = 512
"""Bytes at which an input begins, as those of torch_npu's allocator do."""


class StepInputs:
    """Inputs of a step that follow each other in memory, so that one copy moves them: each copy
    costs a launch on the host, and a few microseconds on the NPU.

    Attributes:
        host: the inputs by name, in pinned memory.
        device: the inputs by name, on the NPU.
    """

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        """Take the place of ``inputs``, tensors on the NPU. Of the last one a step copies what it
        has, of the others everything."""
        starts, end = [], 0
        for tensor in inputs.values():
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        *_, last = inputs.values()
        self._last = starts[-1], last.itemsize
        with torch.inference_mode(False):  # as vLLM's buffers
            self._memory = torch.zeros(end, dtype=torch.uint8, device=last.device)
            self._pinned = torch.zeros(end, dtype=torch.uint8, pin_memory=True, device="cpu")
        self.host, self.device = (
            {
                name: memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
                for (name, each), start in zip(inputs.items(), starts, strict=True)
            }
            for memory in (self._pinned, self._memory)
        )

    def take(self, name: str, buffer: Any) -> None:
        """Let a ``CpuGpuBuffer`` of vLLM use the input's memory."""
        buffer.cpu, buffer.gpu = self.host[name], self.device[name]
        buffer.np = buffer.cpu.numpy()

    def copy(self, count: int) -> None:
        """Copy all inputs to the NPU, of the last one ``count`` elements."""
        start, size = self._last
        used = slice(start + count * size)
        self._memory[used].copy_(self._pinned[used], non_blocking=True)


class HostInputsMixin:
    """Mixin for GPUModelRunner that computes a step's inputs on the host and copies them to the
    device at once.

    vLLM computes them on the device, with some fifteen small operators, as the numbers of accepted
    draft tokens may still be there. Only with asynchronous speculative decoding they are; otherwise
    the host knows all sequence lengths.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Token ids are copied on their own: torch.compile would take them and positions for one
        # tensor, whose size is the memory's.
        buffers = {
            name: getattr(self, name) for name in ("query_start_loc", "discard_request_mask")
        }
        self._step_inputs = StepInputs(
            {
                "seq_lens": self.seq_lens,
                "logits_indices": torch.zeros_like(self.query_start_loc.gpu[1:]),
                **{name: buffer.gpu for name, buffer in buffers.items()},
                "positions": self.positions,
                "slots": self.input_batch.block_table[0].slot_mapping.gpu,
            }
        )
        for name, buffer in buffers.items():
            self._step_inputs.take(name, buffer)
        self.seq_lens, self.positions = (
            self._step_inputs.device[name] for name in ("seq_lens", "positions")
        )
        self._computed_tokens = torch.zeros_like(self.num_computed_tokens, device="cpu")
        self.take_slots()
        # The sampler's dtype, so that sampled tokens are copied to the host without a cast.
        self.sampled_token_ids_pinned_cpu = self.sampled_token_ids_pinned_cpu.int().pin_memory()
        if self.parallel_config.pipeline_parallel_size > 1:
            # Several batches are in flight, and a stage that does not sample never waits for its
            # NPU: vLLM, which has this event with asynchronous scheduling only, would overwrite the
            # inputs of one batch before they are copied.
            self.prepare_inputs_event = torch.npu.Event(blocking=True)

    def take_slots(self: Any) -> None:
        """Let the first KV cache group with slots use the step's memory; others copy their own.

        To be called again when vLLM has made its block tables anew.
        """
        tables = self.input_batch.block_table.block_tables
        self._slots = next((each.slot_mapping for each in tables if _has_slots(each)), None)
        if self._slots is not None:
            self._step_inputs.take("slots", self._slots)

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        if self.use_async_spec_decode:
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self.input_batch.block_table.compute_slot_mapping = self._copy_inputs
        with self._inputs_on_host():
            indices, drafts, most = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        if drafts is None:
            indices = self._step_inputs.device["logits_indices"][: self.input_batch.num_reqs]
        return indices, drafts, most

    @contextmanager
    def _inputs_on_host(self: Any) -> Iterator[None]:
        """Let vLLM's code compute in host memory what it would compute on the device."""
        host = {name: self._step_inputs.host[name] for name in ("seq_lens", "positions")}
        host["num_computed_tokens"] = self._computed_tokens
        tensors = {name: getattr(self, name) for name in host}
        buffers = [self.req_indices, self.query_pos, self.num_scheduled_tokens]
        buffers += [self.query_start_loc, self.discard_request_mask]
        if self.speculative_config is None:
            buffers.append(self.num_accepted_tokens)  # all ones, which nothing reads
        on_device = [buffer.gpu for buffer in buffers]
        vars(self).update(host)
        for buffer in buffers:
            buffer.gpu = buffer.cpu
        try:
            yield
        finally:
            vars(self).update(tensors)
            for buffer, tensor in zip(buffers, on_device, strict=True):
                buffer.gpu = tensor

    def _copy_inputs(
        self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Compute the slot mapping of each KV cache group, and copy all inputs; replaces
        ``MultiGroupBlockTable.compute_slot_mapping``, which vLLM calls when the other inputs are
        complete and none is used yet."""
        num_tokens = len(positions)
        for table in self.input_batch.block_table.block_tables:
            if _has_slots(table):
                table.slot_mapping.np[:num_tokens] = slots_of(
                    table, self.req_indices.np[:num_tokens], positions.numpy()
                )
                if table.slot_mapping is not self._slots:
                    table.slot_mapping.copy_to_gpu(num_tokens)
        torch.sub(query_start_loc[1:], 1, out=self._step_inputs.host["logits_indices"][:num_reqs])
        self._step_inputs.copy(num_tokens)


def _has_slots(table: Any) -> bool:
    mode = getattr(table, "slot_mapping_mode", None)  # vLLM 0.31 has no modes
    return mode is None or mode.value != "none"
