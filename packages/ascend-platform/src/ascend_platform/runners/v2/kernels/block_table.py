# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Block tables of the V2 runner, by operators instead of kernels that take addresses; with prefill
context parallelism too."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from ascend_platform.kernels import ragged
from ascend_platform.runners.v2.kernels import buffers
from ascend_platform.runners.v2.kernels.step import Step


class NPUBlockTables(BlockTables):
    """BlockTables whose padding slots are in the null block; npu_scatter_pa_kv_cache rejects slot
    -1.

    Entries of a row after the request's blocks are those of earlier requests; attention does not
    read them.
    """

    _num_dirty_rows: int
    _gathered: tuple[bytes, int] | None = None
    """States and number of rows of the last step's tables, while those of the requests are the
    same."""

    def __init__(
        self, *arguments: Any, dcp_sharded: list[bool] | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, dcp_sharded=dcp_sharded, **named)  # type: ignore[misc]
        ranks = ragged.Ranks(self.cp_size, self.cp_rank, self.cp_interleave)
        is_sharded = dcp_sharded or [True] * self.num_kv_cache_groups
        self._ranks = [ranks if each else ragged.Ranks() for each in is_sharded]
        self.on_host = [np.zeros(table.gpu.shape, np.int32) for table in self.block_tables]

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Append blocks as vLLM does, and on the host too."""
        starts = self.num_blocks.np[:, req_index].copy()
        if overwrite:
            starts[:] = 0
        super().append_block_ids(req_index, new_block_ids, overwrite)
        for table, start, blocks in zip(self.on_host, starts, new_block_ids, strict=True):
            written = 0 if self.redirect_writes_to_null_block else blocks
            table[req_index, start : start + len(blocks)] = written

    def _make_ptr_tensor(self, x: Any) -> torch.Tensor:
        return torch.empty(0, device=self.device)  # of addresses, which no operator takes

    def apply_staged_writes(self) -> None:
        if any(table._staged_write_indices for table in self.block_tables):
            self._gathered = None
        buffers.apply_writes(*self.block_tables)

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: Any = None,
        out_ptrs: Any = None,
        num_computed_tokens: torch.Tensor | None = None,
        step: Step | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Copy the rows of the step's requests to the tables of the forward pass, followed by zeros
        for padding requests.

        Blocks that have left a sliding window become the null block, because vLLM may have given
        them to other requests. ``out`` are other tables than ``input_block_tables``, for prefill
        context parallelism; ``out_ptrs`` is not used.
        """
        tables = self.input_block_tables if out is None else out
        num_reqs = len(idx_mapping)
        num_rows = num_reqs_padded
        step = step or Step()
        nulls = [
            step.num_null_blocks(idx_mapping, num_computed_tokens, reach, size)
            if reach and num_computed_tokens is not None
            else None
            for reach, size in zip(self._sliding_window_reach, self.block_sizes, strict=True)
        ]
        if out is None:
            has_nulls = any(num_null is not None for num_null in nulls)
            gathered = None if has_nulls else step.requests_in_tables(num_reqs_padded)
            if gathered is not None and gathered == self._gathered:
                return tuple(table[:num_reqs_padded] for table in tables)
            self._gathered = gathered
            num_rows = max(num_reqs_padded, self._num_dirty_rows)  # a larger batch has left rows
            self._num_dirty_rows = num_reqs
        for source, table, num_null in zip(self.block_tables, tables, nulls, strict=True):
            rows = table[:num_reqs]
            torch.index_select(source.gpu, 0, idx_mapping, out=rows)
            if num_null is not None:
                columns = torch.arange(rows.shape[1], dtype=torch.int32, device=self.device)
                rows.masked_fill_(columns < num_null[:, None], 0)
            if num_rows > num_reqs:
                table[num_reqs:num_rows].zero_()
        return tuple(table[:num_reqs_padded] for table in tables)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: Any = None,
        num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Write the slot of each of the step's tokens, from the tables that
        :meth:`gather_block_tables` has made.

        Drafters pass only the positions of their tokens, without ``num_tokens``, and negative rows
        of ``idx_mapping`` for requests of a dummy run, whose slots are in the null block.
        """
        starts, of_drafter = query_start_loc[: len(idx_mapping) + 1], num_tokens is None
        if num_tokens is None:
            num_tokens = len(positions)
        mappings = self.slot_mappings if out is None else out
        for group, slots in enumerate(mappings):
            table, size = self.input_block_tables[group], self.block_sizes[group]
            if self._slot_mapping_enabled[group]:
                ragged.write_slots(
                    slots, table, starts, positions[:num_tokens], size, self._ranks[group]
                )
                if of_drafter and num_tokens == len(idx_mapping):
                    null = ragged.null_slots(num_tokens, size, self.device)
                    slots[:num_tokens].copy_(torch.where(idx_mapping < 0, null, slots[:num_tokens]))
            first = num_tokens if self._slot_mapping_enabled[group] else 0
            ragged.fill_null_slots(slots[:num_tokens_padded], first, size)
        return mappings[:, :num_tokens_padded]

    def copy_slot_mappings(
        self, rows: np.ndarray, positions: np.ndarray, num_tokens_padded: int, out: Any = None
    ) -> torch.Tensor:
        """Like :meth:`compute_slot_mappings`, on the host.

        Args:
            rows: int64 ``[tokens]``, each token's state.
            positions: int64 ``[tokens]``, each token's position in its request.
        """
        mappings = self.slot_mappings if out is None else out
        copies = []
        for group, mapping in enumerate(mappings):
            size = self.block_sizes[group]
            slots = np.arange(num_tokens_padded) % size  # of the null block
            if self._slot_mapping_enabled[group]:
                slots[: len(positions)] = ragged.slots_on_host(
                    self.on_host[group], rows, positions, size, self._ranks[group]
                )
            copies.append((slots, mapping[:num_tokens_padded]))
        buffers.copy_each(*copies)
        return mappings[:, :num_tokens_padded]

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Like the base method; also discards the previous step's tables."""
        self._gathered = None
        return super().get_dummy_block_tables(num_reqs)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Slots of the null block for all tokens."""
        for slots, size in zip(self.slot_mappings, self.block_sizes, strict=True):
            ragged.fill_null_slots(slots, 0, size)
        return self.slot_mappings[:, :num_tokens]


class NPUPCPManager(PCPManager):
    """PCPManager whose padding slots are in the null block. A rank computes parts of each prompt,
    and has the whole KV cache."""

    _block_tables: Any
    _local_block_tables: tuple[torch.Tensor, ...]
    _global_batch_slot_mappings: torch.Tensor

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pad_slot_id.zero_()

    @staticmethod
    def validate_config(vllm_config: VllmConfig, supports_mm_inputs: bool) -> None:
        """Like the base method, which refuses all but latent attention, because vLLM's other
        attention layers do not gather the keys of the ranks. What else it refuses is in
        ``ascend_platform/config/unsupported.py``."""
        if vllm_config.model_config.use_mla:
            PCPManager.validate_config(vllm_config, supports_mm_inputs)

    def partition_batch(self, input_batch: InputBatch, *arguments: Any) -> InputBatch:
        """Return this rank's partition. A rank without tokens gets one dummy request, whose
        `seq_lens_cpu_upper_bound` is set to 0."""
        batch = super().partition_batch(input_batch, *arguments)
        if not batch.num_tokens:
            batch.seq_lens_cpu_upper_bound.zero_()
        return batch

    def prepare_attn(
        self, input_batch: InputBatch, of_all: Step, num_computed_tokens: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables of this rank's requests, and the slots of all ranks' tokens, as vLLM gathers
        these before it writes them.

        Args:
            input_batch: of this rank.
            of_all: the whole step.
            num_computed_tokens: int32 ``[states]``, before the step.
        """
        requests = input_batch.idx_mapping
        padded = input_batch.num_reqs_after_padding
        step = self.global_batch
        tables = self._block_tables.gather_block_tables(
            requests,
            padded,
            out=self._local_block_tables,
            num_computed_tokens=num_computed_tokens,
        )
        slots = of_all.compute_slot_mappings(
            self._block_tables,
            step.idx_mapping,
            step.query_start_loc,
            step.positions,
            step.num_tokens,
            num_tokens=step.num_tokens,
            out=self._global_batch_slot_mappings,
        )
        return tables, self._convert_to_gathered_slot_mappings(slots)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Slot 0, which is in the null block, for the tokens of all ranks."""
        return super().get_dummy_slot_mappings(num_tokens).zero_()
