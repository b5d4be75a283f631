# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shared experts on a stream of their own, beside router, token exchange and routed experts.

vLLM's class does so on CUDA. The two streams wait for each other on the device: the second for the
layer's input, the first for the output.
"""

import functools
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
    SharedExperts,
    SharedExpertsOrder,
)

from ascend_platform import options


@functools.cache
def _stream(device: int) -> Any:
    """The second stream of an NPU, one for all layers."""
    return torch.npu.Stream(device)


class NPUSharedExperts(SharedExperts):
    """vLLM's shared experts, with the option ``ascend.platform.shared_experts_stream``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        config = get_current_vllm_config()
        lora = config.lora_config
        # Collectives of both streams in one group could be reordered.
        sharded = lora is not None and lora.fully_sharded_loras
        wanted = options.of(options.Platform, config).shared_experts_stream
        if wanted and not sharded and not envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM:
            self._stream = _stream(torch.npu.current_device())
            self._input_ready_event = [torch.npu.Event(), torch.npu.Event()]
            self._output_ready_event = [torch.npu.Event(), torch.npu.Event()]

    def _determine_shared_experts_order(self, hidden_states: torch.Tensor) -> SharedExpertsOrder:
        order = super()._determine_shared_experts_order(hidden_states)
        small = hidden_states.shape[0] <= envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
        overlaps = order == SharedExpertsOrder.NO_OVERLAP and self._stream is not None and small
        if overlaps and not self._disable_shared_experts_overlap:
            return SharedExpertsOrder.MULTI_STREAM_OVERLAPPED
        return order

    def maybe_forward_async(self, shared_experts_input: torch.Tensor) -> bool:
        """Like the base method, but on an NPU stream: queue the shared experts, and return whether
        :meth:`wait` has to be called."""
        order = self._determine_shared_experts_order(shared_experts_input)
        if order != SharedExpertsOrder.MULTI_STREAM_OVERLAPPED:
            return False
        index = self._output_idx
        is_capturing = torch.npu.is_current_stream_capturing()
        self._input_ready_event[index].record(torch.npu.current_stream())
        with torch.npu.stream(self._stream):
            self._input_ready_event[index].wait(self._stream)
            if is_capturing:
                # torch_npu queues the wait that adds the stream to the capture. Before that, its
                # allocator would see a stream that is not captured, and allocate outside of the
                # graph's pool. Reading this waits for the queue.
                torch.npu.current_stream().npu_stream  # noqa: B018
            self._output[index] = self._layer(shared_experts_input)
            self._output_ready_event[index].record(self._stream)
        return True

    def wait(self) -> None:
        """Let the main stream wait for the output."""
        self._output_ready_event[self._output_idx].wait(torch.npu.current_stream())
