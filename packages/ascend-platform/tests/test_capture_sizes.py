# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Number of capture sizes within the limit of streams."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from ascend_platform import host
from ascend_platform.graph import acl_graph, capture_sizes
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

MODE = "hccl_op_expansion_mode"
# vLLM's own sizes, for 256 concurrent requests.
SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [
        ("FULL", 51),
        ("FULL_DECODE_ONLY", 35),
        ("PIECEWISE", 29 * 51),
        ("FULL_AND_PIECEWISE", 29 * 51 + 35),
    ],
)
def test_num_graphs(mode: str, graphs: int) -> None:
    assert capture_sizes.num_graphs(CUDAGraphMode[mode], SIZES, 29, 256) == graphs


def test_graphs_of_an_encoder_take_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_sizes, "num_streams_here", lambda graphs, config: graphs)
    compilation = SimpleNamespace(**{capture_sizes.ENCODER_GRAPHS: 9})
    config = SimpleNamespace(compilation_config=compilation)
    sizes = capture_sizes.GraphSizes(config, CUDAGraphMode.FULL, 29, 256)
    assert sizes._num_streams(SIZES) == 51 + 9


@pytest.mark.parametrize(
    ("groups", "on_vector_cores", "streams"),
    [(0, 0, 100), (1, 1, 200), (2, 2, 300), (1, 0, 340), (2, 0, 580), (2, 1, 440)],
)
def test_num_streams_by_mode_of_hccl(groups: int, on_vector_cores: int, streams: int) -> None:
    """Except on the vector cores a captured collective takes two streams, and each communicator some
    of its own."""
    assert capture_sizes.num_streams(100, groups, on_vector_cores) == streams
    # of shared experts
    assert capture_sizes.num_streams(100, groups, on_vector_cores, own=2) == streams + 100


@pytest.mark.parametrize(
    ("variable", "of_tp", "streams"),
    [
        ("", {}, 580),
        ("AIV", {}, 300),
        ("", {MODE: 3}, 440),
        ("AIV", {MODE: 0}, 300),
        ("AIV", {MODE: 2}, 440),
    ],
)
def test_groups_have_modes_of_their_own(
    variable: str, of_tp: dict[str, int], streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(ranks: int, config: dict[str, int]) -> Any:
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = config
        backend = SimpleNamespace(options=options)
        of_device = SimpleNamespace(_get_backend=lambda device: backend)
        return SimpleNamespace(world_size=ranks, device_group=of_device)

    groups = {"tp": group(2, of_tp), "dp": group(2, {}), "pcp": group(1, {MODE: 3})}
    for name, each in groups.items():
        monkeypatch.setattr(capture_sizes, f"get_{name}_group", lambda each=each: each)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", variable)
    config = SimpleNamespace(model_config=SimpleNamespace(is_moe=False))
    assert capture_sizes.num_streams_here(100, config) == streams


@pytest.mark.parametrize(("expected", "each"), [(1800, 1), (1800, 2), (840, 1), (840, 3)])
def test_max_sizes_that_fit(expected: int, each: int) -> None:
    def streams(sizes: list[int]) -> int:
        return each * capture_sizes.num_graphs(CUDAGraphMode.FULL_AND_PIECEWISE, sizes, 29, 256)

    count = capture_sizes.max_sizes_that_fit(SIZES, expected, streams)
    kept = capture_sizes.subsample_sizes(SIZES, count)
    assert len(set(kept)) == count
    assert (kept[0], kept[-1]) == (1, 512)
    assert streams(kept) <= expected
    assert (
        count == len(SIZES) or streams(capture_sizes.subsample_sizes(SIZES, count + 1)) > expected
    )


def test_at_least_one_size() -> None:
    assert capture_sizes.max_sizes_that_fit(SIZES, 10, lambda sizes: 2000 * len(sizes)) == 1
    assert capture_sizes.subsample_sizes(SIZES, 1) == [512]


@pytest.mark.parametrize(
    ("driver", "cann", "kept"),
    [
        ("24.1.rc3", "9.1.0", [1, 512]),
        ("25.5.rc1", "9.1.0", [1, 512]),
        ("25.5.1", "8.3.0", [1, 512]),
        ("", "9.1.0", [1, 512]),
        ("25.5.1", "8.5.0", None),
        ("26.0", "9.1.0", None),
    ],
)
def test_all_sizes_are_captured_where_streams_are_reused(
    driver: str, cann: str, kept: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "driver_version", lambda: driver)
    monkeypatch.setattr(host, "cann_version", lambda: cann)
    monkeypatch.setattr(capture_sizes, "_min_over_ranks", lambda number: number)
    monkeypatch.setattr(capture_sizes, "is_global_first_rank", lambda: True)
    assert capture_sizes.sizes_that_fit(SIZES, lambda sizes: 900 * len(sizes)) == kept


@pytest.mark.parametrize(
    "message",
    [
        "error code is 207008\nInsufficient_Stream_Resources(EL0009)",
        "error code is 207005",
        (
            "HCCL function error: error code is 4\n[SqCqManage]Alloc sq cq fail, stream_id=1984,"
            " retCode=0x7020023."
        ),
    ],
)
def test_exhausted_streams_are_recognized_by_code_or_text(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_sizes, "_min_over_ranks", lambda number, group: number)
    with pytest.raises(capture_sizes.OutOfStreamsError), capture_sizes.failing_on_all_ranks():
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="another"), capture_sizes.failing_on_all_ranks():
        raise RuntimeError("another error, 107003")


def backend(support: AttentionCGSupport) -> Any:
    builder = SimpleNamespace(get_cudagraph_support=lambda config, spec: support)
    return SimpleNamespace(get_builder_cls=lambda: builder)


@pytest.mark.parametrize(
    ("stages", "another", "supported"), [(2, 0, "NEVER"), (2, 2, None), (2, 3, None), (1, 0, None)]
)
def test_a_pipeline_stage_supports_what_the_others_do(
    stages: int, another: int, supported: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage whose layers with states can be captured, beside one whose attention can
    or cannot."""
    asked: list[int] = []
    monkeypatch.setattr(capture_sizes, "get_pp_group", lambda: SimpleNamespace(world_size=stages))
    monkeypatch.setattr(
        capture_sizes,
        "_min_over_ranks",
        lambda stage_value: asked.append(stage_value) or min(stage_value, another),
    )
    backends: list[Any] = [
        [backend(AttentionCGSupport.UNIFORM_BATCH), backend(AttentionCGSupport.ALWAYS)],
        [],
    ]
    groups = [SimpleNamespace(kv_cache_spec=None)] * len(backends)
    result = capture_sizes.support_of_other_stages(None, backends, groups)
    assert asked == [AttentionCGSupport.UNIFORM_BATCH.value] * (stages - 1)
    assert (result and result.get_builder_cls().get_cudagraph_support(None, None).name) == supported


def test_capture_disables_garbage_collection_and_keeps_frozen_objects() -> None:
    script = """
import gc
from ascend_platform.graph.capture_sizes import freeze_gc

class Cycle:
    def __init__(self):
        self.itself = self

gc.collect()
gc.freeze()
frozen = gc.get_freeze_count()
with freeze_gc():
    assert not gc.isenabled()
    Cycle()
assert gc.isenabled()
assert not any(isinstance(each, Cycle) for each in gc.get_objects())
assert gc.get_freeze_count() > 0.99 * frozen > 100_000
gc.disable()
with freeze_gc():
    pass
assert not gc.isenabled()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_graph_outputs_are_kept_while_the_drafter_graph_runs() -> None:
    """The first graph's output is freed when it has been captured, as vLLM's wrapper does, and
    another may take its memory."""
    given, pool, stream = (
        torch.arange(4096.0, device="npu"),
        torch.npu.graph_pool_handle(),
        torch.npu.Stream(),
    )
    graphs, outputs = [], []
    for factor, context in (
        (2, contextlib.nullcontext()),
        (3, acl_graph.drafter_pool()),
        (4, acl_graph.drafter_pool()),
    ):
        graphs.append(acl_graph.NPUGraph())
        with context, acl_graph._Capture(graphs[-1], pool, stream):
            outputs.append(acl_graph.weak_ref_tensor(given * factor))
    for graph in graphs:
        graph.replay()
    torch.npu.synchronize()
    target, first, second = outputs
    assert torch.equal(target, given * 2)
    assert torch.equal(first, second)  # a drafter's graphs share their memory
    assert torch.equal(second, given * 4)
