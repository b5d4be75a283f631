"""Metadata of the fused attention: one step's batch."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata


@dataclass(frozen=True)
class Spread:
    """A step's part for this rank.

    cached: tokens of each request that this rank has of earlier steps, on the host; None where no rank has any.
    mine: int64 ``[n]``, which of the step's tokens this rank keeps.
    slots: int64 ``[n]``, where.
    """

    cached: list[int] | None
    mine: torch.Tensor
    slots: torch.Tensor


@dataclass
class FusedAttentionMetadata(AttentionMetadata):
    """One step's batch, the same for all layers.

    lengths: the kernel's arguments on the host, which a graph gets anew for each replay (``extension.graph_task``):
        actual_seq_lengths, where each request's tokens end among the step's, the last being their number, and
        actual_seq_lengths_kv, tokens of each request in the cache once this step's are written.
    tokens: of the step; in a full graph with its padding, which belongs to requests that there are not.
    block_table: int32 ``[requests, blocks]``.
    slot_mapping: int64, each new key's place in the cache; vLLM replaces it where an encoder's are written.
    mask: int8 ``[2048, 2048]``, 1 above the diagonal.
    log_sums: float32 ``[1]``, what the kernel wants for the second output that we do not ask for.
    causal: False where every token sees all of its request's keys, which are an encoder's.
    spread: under decode context parallelism, this rank's part.
    """

    lengths: dict[str, Any]
    tokens: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    mask: torch.Tensor
    log_sums: torch.Tensor
    causal: bool = True
    spread: Spread | None = None
