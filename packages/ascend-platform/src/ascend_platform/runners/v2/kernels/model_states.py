# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Model states of the V2 runner whose kernels take addresses: recurrent states at the ends of cached
prefixes, and prompt embeddings.

The host knows what is copied, so that vLLM's kernels are replaced by copies of slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState
from vllm.v1.worker.mamba_utils import get_mamba_group_ids, get_mamba_groups

from ascend_platform.runners.v2.kernels.block_table import NPUBlockTables
from ascend_platform.state_layers import state_cache


class NPUMambaHybridModelState(MambaHybridModelState):
    """MambaHybridModelState that copies states by block numbers, which the host has without draft
    tokens; prefix caching is refused with them."""

    _block_tables: NPUBlockTables

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._has_drafts = self.vllm_config.num_speculative_tokens > 0
        # With prefix caching: the block of each request's running state, -1 before the first.
        self._columns = np.full(self.max_num_reqs, -1)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        if self._align_mode:
            size = self.cache_config.mamba_block_size
            assert size is not None
            self._columns[req_index] = (new_req_data.num_computed_tokens - 1) // size

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: Any) -> None:
        """Keep the block tables; vLLM keeps addresses of states and tables."""
        self._block_tables = block_tables

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Copy the states of requests that begin another block to that block."""
        if self._has_drafts:
            self._begin_one_token_prompts(input_batch, kv_cache_config)
        if not self._align_mode:
            return
        groups, spec = self._get_mamba_group_info(kv_cache_config)
        rows = input_batch.idx_mapping_np
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        before, after = self._columns[rows], (computed - 1) // spec.block_size
        self._columns[rows] = after
        layers = self.vllm_config.compilation_config.static_forward_context
        for index in np.flatnonzero((before >= 0) & (before != after)):
            for group in groups:
                blocks = self._block_tables.on_host[group][rows[index]]
                copied = int(blocks[before[index]]), int(blocks[after[index]])
                names = kv_cache_config.kv_cache_groups[group].layer_names
                state_cache.copy(layers, names, *copied)

    def _begin_one_token_prompts(self, batch: InputBatch, kv_cache_config: KVCacheConfig) -> None:
        """Compute one-token prompts that have draft slots as decodes, from states of zeros.

        vLLM's scheduler adds the draft slots so that the step stays uniform
        (``vllm/v1/core/sched/scheduler.py``, pad_spec_decode). A prefill would keep the states after
        the drafts.
        """
        drafts = batch.num_draft_tokens_per_req
        if drafts is None or batch.prefill_runs_as_decode_np is None:
            return
        begins = (drafts > 0) & (batch.num_computed_tokens_np == 0)
        groups = get_mamba_group_ids(get_mamba_groups(kv_cache_config)) if begins.any() else []
        batch.prefill_runs_as_decode_np |= begins
        layers = self.vllm_config.compilation_config.static_forward_context
        for row in batch.idx_mapping_np[begins]:
            for group in groups:
                block = int(self._block_tables.on_host[group][row, 0])
                names = kv_cache_config.kv_cache_groups[group].layer_names
                state_cache.clear(layers, names, block)

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Keep the numbers of accepted tokens, which layers read with draft tokens only; negative
        rows are skipped."""
        if not self._has_drafts or not len(idx_mapping):
            return
        rows, accepted = idx_mapping.clamp(min=0), self.num_accepted_tokens_gpu
        difference = -accepted.index_select(0, rows)
        difference += 1 if isinstance(num_sampled, int) else num_sampled.clamp(min=1)
        accepted.scatter_add_(0, rows, difference.masked_fill_(idx_mapping < 0, 0))


class NPUPromptEmbedsState(PromptEmbedsState):
    """PromptEmbedsState that copies the slices of the step's prompts."""

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        if new_req_data.req_id in self.gpu_tensors:
            embeds, is_token = self.gpu_tensors[new_req_data.req_id]
            is_token = None if is_token is None else is_token.bool()[:, None]
            self.gpu_tensors[new_req_data.req_id] = embeds, is_token

    def apply_staged_writes(self) -> None:
        """No-op: the addresses are not read."""

    def apply(
        self,
        input_batch: InputBatch,
        num_computed_tokens: torch.Tensor,
        inputs_embeds: torch.Tensor,
    ) -> None:
        """Write the embeddings of the step's prompt tokens, except where a prompt has token ids."""
        starts = input_batch.query_start_loc_np
        for index, (req_id, first) in enumerate(
            zip(input_batch.req_ids, input_batch.num_computed_tokens_np.tolist(), strict=True)
        ):
            embeds, is_token = self.gpu_tensors.get(req_id, (None, None))
            if embeds is None or first >= len(embeds):
                continue
            count = min(int(starts[index + 1] - starts[index]), len(embeds) - first)
            written = inputs_embeds[starts[index] : starts[index] + count]
            given = embeds[first : first + count]
            if is_token is not None:
                given = torch.where(is_token[first : first + count], written, given)
            written.copy_(given)
