# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_unpaged.py: attention with decode context parallelism on two ranks, each with an NPU.

    python dcp_ranks.py HEAD_SIZE WORKSPACE_TOKENS...

Prints one line `RESULT {json}` with each rank's largest difference from float64 with each size of
the workspace, relative to what bfloat16 resolves. A first step writes the contexts, and the second
one computes chunks and decodes. The ranks are forks.
"""

import json
import os
import sys
from functools import partial

import torch
from harness.engines import launcher
from harness.references.paged_batches import reference
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.plugins import load_general_plugins

RANKS, BLOCK, HEADS = 2, 128, 4
REQUESTS = [(1, 600), (1, 0), (40, 500), (3, 1), (20, 0), (60, 300)]
"""New tokens and those before; decodes are first."""


def common_of(counts, lengths, first, table, rank):
    """vLLM's metadata of a step with tokens from ``first`` on: tokens are on the ranks in turn."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    totals = torch.tensor(lengths, dtype=torch.int32)
    slots = []
    for row, count, start in zip(table, counts, first, strict=True):
        for token in range(start, start + count):
            block, place = divmod(token, BLOCK * RANKS)
            is_local = token % RANKS == rank
            slots.append(row[block] * BLOCK + place // RANKS if is_local else -1)
    return CommonAttentionMetadata(
        query_start_loc=starts.npu(),
        query_start_loc_cpu=starts,
        seq_lens=totals.npu(),
        seq_lens_cpu_upper_bound=totals,
        num_reqs=len(counts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(table, dtype=torch.int32).npu(),
        slot_mapping=torch.tensor(slots).npu(),
    )


def play(size: int, rooms: list[int], rank: int, port: int) -> list[float]:
    os.environ.update(launcher.torchrun_variables(rank, RANKS, port))
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    load_general_plugins()
    layout = ParallelConfig(tensor_parallel_size=RANKS, decode_context_parallel_size=RANKS)
    config = VllmConfig(parallel_config=layout)
    with set_current_vllm_config(config), torch.inference_mode():
        parallel_state.init_distributed_environment(RANKS, rank, "env://", rank, "hccl")
        parallel_state.initialize_model_parallel(
            RANKS, decode_context_model_parallel_size=RANKS, backend="hccl"
        )
        return [largest_error(config, size, room, rank) for room in rooms]


def largest_error(config: VllmConfig, size: int, room: int, rank: int) -> float:
    from ascend_attention import dense, unpaged
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    unpaged.WORKSPACE_TOKENS = room
    torch.manual_seed(0)
    lengths = [sum(request) for request in REQUESTS]
    heads = RANKS * HEADS
    queries = [torch.randn(n, heads, size).bfloat16() for n, _ in REQUESTS]
    keys, values = ([torch.randn(n, 1, size).bfloat16() for n in lengths] for _ in range(2))
    own_heads = slice(rank * HEADS, (rank + 1) * HEADS)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=torch.bfloat16)
    builder = dense.FusedAttentionMetadataBuilder(spec, ["layer"], config, torch.device("npu"))
    layer = dense.FusedAttentionImpl(HEADS, size, size**-0.5, 1)
    table = [[1 + 4 * row + place for place in range(4)] for row in range(len(REQUESTS))]
    cache = tuple(torch.full((2, 26, BLOCK, 1, size), 1e4).bfloat16().npu())

    def step(requests, first, counts, query):
        part = [slice(start, start + n) for start, n in zip(first, counts, strict=True)]
        new = (
            torch.cat([rows[r][p] for r, p in zip(requests, part, strict=True)]).npu()
            for rows in (keys, values)
        )
        ends = [start + n for start, n in zip(first, counts, strict=True)]
        common = common_of(counts, ends, first, [table[r] for r in requests], rank)
        output = torch.empty_like(query)
        layer.forward(None, query, *new, cache, builder.build(0, common), output)
        return output.cpu().double()

    before = [r for r, (_, context) in enumerate(REQUESTS) if context]
    contexts = [REQUESTS[r][1] for r in before]
    rows = torch.randn(sum(contexts), HEADS, size).bfloat16().npu()
    step(before, [0] * len(before), contexts, rows)
    query = torch.cat(queries)[:, own_heads].contiguous().npu()
    every = range(len(REQUESTS))
    actual = step(every, [c for _, c in REQUESTS], [n for n, _ in REQUESTS], query)
    expected = torch.cat(
        [
            reference(q[:, own_heads], k, v, size**-0.5)
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
    )
    bound = torch.finfo(torch.bfloat16).eps * (1 + expected.abs())
    return float(((actual - expected).abs() / bound).max())


if __name__ == "__main__":
    size, *rooms = map(int, sys.argv[1:])
    results = launcher.run_ranks("dcp_ranks.py", RANKS, partial(play, size, rooms))
    print("RESULT", json.dumps({"name": "dcp", "ranks": results}))
