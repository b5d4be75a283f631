"""Prefill context parallelism of the V2 runner: a rank computes parts of every prompt, and all have the whole KV cache."""

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from ascend_platform.worker.v2.host_inputs import HostInputs


class NPUPCPManager(PCPManager):
    """PCPManager whose padding slots are in the null block; npu_scatter_pa_kv_cache rejects slot -1."""

    _block_tables: Any
    _local_block_tables: tuple[torch.Tensor, ...]
    _global_batch_slot_mappings: torch.Tensor

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pad_slot_id.zero_()

    def partition_batch(self, input_batch: InputBatch, *arguments: Any) -> InputBatch:
        """This rank's part of the step. A rank without tokens has one request without any, whose length on the host becomes 0."""
        batch = super().partition_batch(input_batch, *arguments)
        if not batch.num_tokens:
            batch.seq_lens_cpu_upper_bound.zero_()
        return batch

    def prepare_attn(self, input_batch: InputBatch, host: HostInputs) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables of this rank's requests, and the slots of all ranks' tokens, as vLLM gathers these before it writes them.

        Args:
            input_batch: this rank's.
            host: the inputs of the whole step.
        """
        requests, padded, step = input_batch.idx_mapping, input_batch.num_reqs_after_padding, self.global_batch
        tables = self._block_tables.gather_block_tables(requests, padded, out=self._local_block_tables)
        slots = self._block_tables.compute_slot_mappings(
            step.idx_mapping,
            step.query_start_loc,
            step.positions,
            step.num_tokens,
            out=self._global_batch_slot_mappings,
            num_tokens=step.num_tokens,
            host=host,
        )
        return tables, self._convert_to_gathered_slot_mappings(slots)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Slot 0, which is in the null block, for the tokens of all ranks."""
        return super().get_dummy_slot_mappings(num_tokens).zero_()
