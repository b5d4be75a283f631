# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Latent attention with expanded keys and values on random paged batches, compared with softmax(q
k^T) v in float64."""

import random

import pytest
import torch
from ascend_attention import latent_prefill
from ascend_attention.context import Piece, cut_context
from ascend_attention.latent_prefill import HEAD, LATENT, ROPE, Prefills
from ascend_attention.metadata import upper_triangle
from harness.references.latent_batches import LatentBatch
from harness.references.paged_batches import reference

HEADS, SCALE = 3, (HEAD + ROPE) ** -0.5


def expected(batch, queries, weight):
    outputs = []
    for query, key in zip(queries, batch.keys, strict=True):
        expanded = (key[:, 0, :LATENT] @ weight.T).unflatten(1, (HEADS, 2 * HEAD))
        rotated = key[:, :, LATENT:].expand(-1, HEADS, -1)
        key_and_value = torch.cat([expanded[..., :HEAD], rotated], -1), expanded[..., HEAD:]
        outputs.append(reference(query, *key_and_value, SCALE))
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [50, 128, 1000])
@pytest.mark.parametrize(
    "requests",
    [
        [(200, 0), (190, 0)],
        [(171, 300), (180, 129), (200, 0)],
        [(200, 0), (1, 77), (180, 0), (300, 260)],
    ],
)
def test_prompts_and_chunks(requests, size):
    """New tokens after any number of tokens in the KV cache, in chunks smaller and larger than
    these; also in any order."""
    rng = random.Random(f"{requests}{size}")
    batch = LatentBatch(1, (LATENT, ROPE), torch.bfloat16, requests, rng)
    queries = [torch.randn(new, HEADS, HEAD + ROPE, dtype=torch.bfloat16) for new, _ in requests]
    weight = torch.randn(HEADS * 2 * HEAD, LATENT, dtype=torch.bfloat16) * LATENT**-0.5
    common = batch.common()
    ends = common.query_start_loc_cpu[1:].tolist()
    mask = upper_triangle(torch.int8, torch.device("npu"))
    prefills = Prefills(
        ends, lambda: [before for _, before in requests], common.block_table_tensor, mask, size
    )
    new, placed = batch.new(batch.keys).npu(), weight.npu()
    latents, ropes = new[:, 0, :LATENT], new[..., LATENT:]
    output = latent_prefill.attend(
        torch.cat(queries).npu(),
        latents,
        ropes,
        batch.held(),
        prefills,
        lambda rows: rows @ placed.T,
        SCALE,
    )
    bound = 0.02  # Keys, values and each merge are rounded to bfloat16.
    torch.testing.assert_close(
        output.cpu().double(), expected(batch, queries, weight), atol=bound, rtol=bound
    )
    assert [len(chunk.slots) <= size for chunk in prefills.chunks].count(False) == 0
    assert sum(len(chunk.slots) for chunk in prefills.chunks) == sum(
        before for _, before in requests
    )


def test_contexts_are_cut_into_chunks_of_consecutive_requests():
    assert cut_context([5, 0, 3, 9], 8) == [
        [Piece(0, 0, 5)],
        [Piece(2, 0, 3), Piece(3, 0, 5)],
        [Piece(3, 5, 9)],
    ]
    assert cut_context([0, 0], 8) == []
