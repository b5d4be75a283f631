# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Limits of attention that are learned from NPUs: large heads over pages on Atlas A2, and workspaces
of captured calls."""

import itertools
import sys
import textwrap

import pytest
import torch
import torch_npu
from fused_attention import COMPRESSED, close, reference

BLOCK, HEADS, GROUPS = 128, 4, 2


def pages(lengths, size):
    """Keys of requests ``[length, groups, size]``, and the same in pages with a block table."""
    keys = [torch.randn(length, GROUPS, size).bfloat16() for length in lengths]
    blocks = [-(-length // BLOCK) for length in lengths]
    cache = torch.full((sum(blocks), BLOCK, GROUPS, size), 9.0).bfloat16()
    table, used = torch.zeros(len(lengths), max(blocks), dtype=torch.int32), 0
    for row, request_keys, count in zip(table, keys, blocks, strict=True):
        row[:count] = torch.arange(used, used + count)
        cache[used : used + count].view(-1, GROUPS, size)[: len(request_keys)] = request_keys
        used += count
    return keys, cache.flatten(2).npu(), table.npu()


def paged(queries, lengths, size, **options):
    """Attention of packed requests over pages, and what it is of in float64."""
    keys, cache, table = pages(lengths, size)
    ends = list(itertools.accumulate(queries))
    query = torch.randn(ends[-1], HEADS, size).bfloat16()
    causal = {"atten_mask": COMPRESSED.npu(), "sparse_mode": 3}
    result = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        cache,
        cache,
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.1,
        input_layout="TND",
        block_table=table,
        block_size=BLOCK,
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=list(lengths),
        **(options or causal),
    )[0]
    for part, pages_of_keys in zip(query.split(queries), keys, strict=True):
        mask = torch.ones(len(part), len(pages_of_keys), dtype=torch.bool).triu(
            len(pages_of_keys) - len(part) + 1
        )
        pages_of_keys = pages_of_keys.transpose(0, 1)
        close(
            result[: len(part)].transpose(0, 1),
            reference(part.transpose(0, 1), pages_of_keys, pages_of_keys, 0.1, mask)[0],
        )
        result = result[len(part) :]


@pytest.mark.parametrize(
    ("queries", "lengths", "size"),
    [((1, 1), (300, 7), 256), ((5, 9), (5, 9), 256), ((5, 1), (300, 20), 192)],
    ids=["decodes", "whole prompts", "smaller heads"],
)
def test_large_heads_over_pages_without_keys_before(queries, lengths, size):
    paged(queries, lengths, size)


@pytest.mark.parametrize("size", [208, 256])
@pytest.mark.parametrize(
    ("queries", "lengths", "mask"),
    [
        ((5,), (300,), {}),
        ((5, 1), (5, 20), {}),
        ((4, 4), (4, 200), {}),
        ((5,), (3,), {"sparse_mode": 0}),
        (
            (5,),
            (300,),
            {"atten_mask": COMPRESSED.npu(), "sparse_mode": 4, "pre_tokens": 7, "next_tokens": 0},
        ),
    ],
    ids=["chunk", "prompt and decode", "prompt and chunk", "keys of others", "window"],
)
def test_large_heads_over_pages_are_refused_on_a2(queries, lengths, mask, size):
    message = (
        rf"head size is {size} .* \(rule fused_infer_large_heads.pages, seen on hardware: vllm"
    )
    with pytest.raises(RuntimeError, match=message):
        paged(queries, lengths, size, **mask)


CHUNK = """
    import sys
    sys.path.append({directory!r})
    from test_attention_limits import paged
    paged((5, 1), (300, 20), 256)
    print("computed")
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--soc", "Ascend910_93"),
        ("--soc", "Ascend910B3", "--allow", "fused_infer_large_heads.pages"),
    ],
    ids=["A3", "allowed"],
)
def test_large_heads_over_pages_elsewhere(run, options):
    script = textwrap.dedent(CHUNK).format(directory=__file__.rpartition("/")[0])
    done = run("run", *options, "--", sys.executable, "-c", script)
    assert done.stdout == "computed\n", done.stderr


def replayed(version, probed, longest, size=128, dtype=torch.bfloat16):
    """A decode captured with one key, in a workspace that was made for ``probed`` ones, and updated
    to ``longest``; what the replay writes, and what it should."""
    keys, cache, table = pages((longest,), size)
    cache, query = cache.to(dtype), torch.randn(1, HEADS, size).to(dtype)
    name = "npu_fused_infer_attention_score" + "_v2" * (version == 2)
    ends, lens, heads, scale = (
        ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale"),
        ("actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "softmax_scale"),
    )[version - 1]
    given = {heads: HEADS, "num_key_value_heads": GROUPS, scale: 0.1, "input_layout": "TND"}
    given |= {"block_table": table, "block_size": BLOCK, ends: [1]}
    tensors = query.npu(), cache, cache
    out, lse = torch.zeros(1, HEADS, size, dtype=dtype).npu(), torch.zeros(1).npu()
    kernel = getattr(torch_npu, name).out
    graph, update = torch.npu.NPUGraph(), torch.npu.Stream()
    workspace = getattr(torch_npu, f"_{name}_get_max_workspace")(
        *tensors, **given, **{lens: [probed]}
    )
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        kernel(*tensors, **given, **{lens: [1]}, workspace=workspace, out=[out, lse])
        handle = torch.npu.graph_task_group_end(stream)
    with torch.npu.stream(update):
        torch.npu.graph_task_update_begin(update, handle)
        try:
            kernel(*tensors, **given, **{lens: [longest]}, workspace=workspace, out=[out, lse])
        finally:
            torch.npu.graph_task_update_end(update)
    torch.npu.synchronize()
    graph.replay()
    heads_first = keys[0].transpose(0, 1)
    return out[0, :, None], reference(query.transpose(0, 1), heads_first, heads_first, 0.1)[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("probed", "longest"), [(300, 300), (384, 257), (29, 100)])
def test_workspace_of_long_enough_sequences(version, probed, longest):
    """The last pair is that of torch_npu's test of updates."""
    close(*replayed(version, probed, longest))


PROBED = """
    import sys
    sys.path.append({directory!r})
    from test_attention_limits import close, replayed, torch
    close(*replayed({version}, 1, 300, dtype=torch.{dtype}))
    print("computed")
"""


@pytest.mark.parametrize(("version", "dtype"), [(1, "bfloat16"), (2, "float16")])
def test_workspace_of_shorter_sequences_is_refused(run, version, dtype):
    """In a process of its own: the call fails on torch_npu's queue thread."""
    script = textwrap.dedent(PROBED).format(
        directory=__file__.rpartition("/")[0], version=version, dtype=dtype
    )
    refused = run("run", "--", sys.executable, "-c", script)
    assert (
        "a request has 300 keys, and the workspace was made for 128: get_max_workspace must have the"
        " longest sequences of later updates (rule attention_workspace.keys, inferred: vllm-ascend,"
        " pull request 15486)" in refused.stderr
    )
    allowed = run("run", "--allow", "attention_workspace.keys", "--", sys.executable, "-c", script)
    assert allowed.stdout == "computed\n", allowed.stderr
