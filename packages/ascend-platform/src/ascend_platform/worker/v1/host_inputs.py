# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Positions, sequence lengths and slot mappings of a step, computed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_platform.kernels.v1.slot_mapping import slots_of


class HostInputsMixin:
    """Mixin for GPUModelRunner that computes a step's inputs on the host and copies each to the
    device once.

    vLLM computes them on the device, with some fifteen small operators, as the numbers of accepted
    draft tokens may still be there. Only with asynchronous speculative decoding they are; otherwise
    the host knows all sequence lengths.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("positions", "seq_lens", "num_computed_tokens")
        self._host_inputs = {
            name: torch.zeros_like(getattr(self, name), device="cpu").pin_memory() for name in names
        }
        # The sampler's dtype, so that sampled tokens are copied to the host without a cast.
        self.sampled_token_ids_pinned_cpu = self.sampled_token_ids_pinned_cpu.int().pin_memory()
        if self.parallel_config.pipeline_parallel_size > 1:
            # Several batches are in flight, and a stage that does not sample never waits for its
            # NPU: vLLM, which has this event with asynchronous scheduling only, would overwrite the
            # inputs of one batch before they are copied.
            self.prepare_inputs_event = torch.npu.Event(blocking=True)

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        if self.use_async_spec_decode:
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self.input_batch.block_table.compute_slot_mapping = self._compute_slot_mapping
        with self._inputs_on_host():
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.positions[:num_tokens].copy_(
            self._host_inputs["positions"][:num_tokens], non_blocking=True
        )
        self.seq_lens.copy_(self._host_inputs["seq_lens"], non_blocking=True)
        return prepared

    @contextmanager
    def _inputs_on_host(self: Any) -> Iterator[None]:
        """Let vLLM's code compute in host memory what it would compute on the device."""
        tensors = {name: getattr(self, name) for name in self._host_inputs}
        buffers = [self.req_indices, self.query_pos, self.num_scheduled_tokens]
        if self.speculative_config is None:
            buffers.append(self.num_accepted_tokens)  # all ones, which nothing reads
        on_device = [buffer.gpu for buffer in buffers]
        vars(self).update(self._host_inputs)
        for buffer in buffers:
            buffer.gpu = buffer.cpu
        try:
            yield
        finally:
            vars(self).update(tensors)
            for buffer, tensor in zip(buffers, on_device, strict=True):
                buffer.gpu = tensor

    def _compute_slot_mapping(
        self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write and copy the slot mapping of each KV cache group; replaces
        ``MultiGroupBlockTable.compute_slot_mapping``."""
        num_tokens = len(positions)
        for table in self.input_batch.block_table.block_tables:
            mode = getattr(table, "slot_mapping_mode", None)  # vLLM 0.31 has no modes
            if mode is None or mode.value != "none":
                table.slot_mapping.np[:num_tokens] = slots_of(
                    table, self.req_indices.np[:num_tokens], positions.numpy()
                )
                table.slot_mapping.copy_to_gpu(num_tokens)
