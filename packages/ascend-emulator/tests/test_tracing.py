# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The trace, modelled times and the null mode."""

import ctypes
import json
import sys

import pytest
import torch
from ascend_emulator import chips, laws, tracing
from ascend_emulator.cli import main
from runtime_calls import ConditionalTask, begin, call, copy, end, memory, replay, stream

PROGRAM = """
import torch, torch_npu
a = torch.randn(256, 512, dtype=torch.float16).npu()
b = torch.randn(512, 128, dtype=torch.float16).npu()
side = torch.npu.Stream()
for _ in range(3):
    c = a @ b
with torch.npu.stream(side):
    d = a + 1
torch.npu.synchronize()
"""


@pytest.fixture(scope="module")
def trace(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    done = run("run", "--trace", str(path), "--", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return path


def test_a_trace_has_operators_copies_and_synchronizations(trace):
    events = tracing.events(trace)
    products = [event for event in events if event["name"] == "aclnnMatmul"]
    assert len(products) == 3
    for event in products:
        assert event["args"]["flops"] == 2 * 256 * 512 * 128
        assert event["args"]["bytes"] == 2 * (256 * 512 + 512 * 128 + 256 * 128)
        assert event["args"]["shapes"] == "Half[256, 512] Half[512, 128] Half[256, 128]"
        assert event["dur"] > 0
    (sum_,) = [event for event in events if event["name"] == "aclnnAdds"]
    assert sum_["args"]["stream"] != products[0]["args"]["stream"]
    assert {"copy", "operator", "synchronize"} <= {event["cat"] for event in events}
    assert any(
        event["cat"] == "copy" and event["args"]["bytes"] in (512 * 128 * 2, 2 * 512 * 128 * 2)
        for event in events
    )


def test_a_trace_names_its_threads(trace):
    text = trace.read_text().strip().removesuffix(",")
    names = {event["args"]["name"] for event in json.loads(text + "]") if event["ph"] == "M"}
    assert any(name.startswith("NPU 0 stream ") for name in names)
    assert any(name.startswith("host ") for name in names)


def test_the_table_sums_up(trace, capsys):
    assert main(["trace", str(trace)]) == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if "aclnnMatmul" in line]
    assert row[:3] == ["operator", "aclnnMatmul", "3"]
    assert float(row[4]) == pytest.approx(3 * 2 * 256 * 512 * 128 / 1e9, abs=1e-3)
    assert "an estimate, not a measurement" in out


def test_a_line_that_is_being_written_is_left_out(trace, tmp_path):
    whole = trace.read_text().rstrip()
    read = len(tracing.events(trace))
    (tmp_path / "growing").write_text(f"{whole}\n{whole.splitlines()[-1][:40]}")
    assert len(tracing.events(tmp_path / "growing")) == read > 0


def test_what_is_no_trace_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "other").write_text("{")
    assert main(["trace", str(tmp_path / "other")]) == 2
    assert "is not a trace of the emulator" in capsys.readouterr().err


def test_modelled_times_are_those_of_the_laws():
    chip, known = chips.chip("Ascend910B1"), laws.laws()
    a, b = (torch.ones(1024, 1024, dtype=torch.bfloat16, device="npu") for _ in range(2))
    with tracing.estimate():
        a.cpu()  # The host's clock is ahead of the stream's then.
    with tracing.estimate() as product:
        a @ b
    with tracing.estimate() as sum_:
        a + b
    size = 3 * 1024 * 1024 * 2
    assert product.seconds[0] == pytest.approx(
        chip.launch + known["matmul"].seconds(chip, size, 2 * 1024**3, 1024), rel=0.01
    )
    assert sum_.seconds[0] == pytest.approx(
        chip.launch + known["elementwise"].seconds(chip, size), rel=0.01
    )


def test_streams_overlap_in_the_model_as_events_allow():
    a = torch.ones(2048, 2048, dtype=torch.bfloat16, device="npu")
    side, main_ = torch.npu.Stream(), torch.npu.current_stream()

    def both(ordered):
        with tracing.estimate() as result:
            a @ a
            if ordered:
                side.wait_stream(main_)
            with torch.npu.stream(side):
                a @ a
        return result.seconds[0]

    with tracing.estimate() as one:
        a @ a
    assert both(ordered=False) == pytest.approx(one.seconds[0], rel=0.1)
    assert both(ordered=True) == pytest.approx(2 * one.seconds[0], rel=0.1)


def test_graph_branch_time_belongs_to_the_replaying_stream():
    torch.ones(1, device="npu")
    (captured, inner, on), size = (stream() for _ in range(3)), 8 << 20
    to, source = memory(size), memory(size)
    status, graph, condition, branch = (
        ctypes.c_int32(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
    )
    with tracing.estimate():
        begin(captured)
        call("aclmdlRICaptureGetInfo", captured, ctypes.byref(status), ctypes.byref(graph))
        call("aclmdlRICondHandleCreate", graph, 1, 1, ctypes.byref(condition))
        call(
            "aclmdlRIAddCondTask",
            ConditionalTask(condition, 0, 1, ctypes.pointer(branch)),
            captured,
            0,
        )
        call("aclmdlRICaptureToModelRIBegin", inner, branch, 2)
        copy(to, source, inner, size)
        end(inner)
        end(captured)
    with tracing.estimate() as one:
        copy(to, source, on, size)
    with tracing.estimate() as both:
        replay(graph, on)
        copy(to, source, on, size)
    assert both.seconds[0] == pytest.approx(2 * one.seconds[0], rel=0.25)
    call("aclmdlRIDestroy", graph)
    for each in (captured, inner, on):
        call("aclrtDestroyStream", each)
    for each in (to, source):
        call("aclrtFree", each)


def test_null_mode_computes_nothing_and_copies(run):
    script = """
import torch, torch_npu
x = torch.full((4,), 3.0).npu()
y = torch.empty(1 << 20, device="npu").uniform_()
print(x.cpu().tolist(), (x @ x).item() == 9.0, torch.tensor([0, 2]).npu().nonzero().tolist())
"""
    done = run("run", "--null", "--", sys.executable, "-c", script)
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0] False [[1]]\n", done.stderr


def test_what_is_touched_in_part_counts_in_part(run, tmp_path):
    """A cache of pages, a long table, and the experts that have no rows cost nothing."""
    script = """
import torch, torch_npu
half = {"dtype": torch.float16, "device": "npu"}
keys, values = torch.randn(64, 128, 2, 64, **half), torch.randn(64, 128, 2, 64, **half)
new = torch.randn(3, 2, 64, **half)
slots = torch.tensor([5, 200, 4000], dtype=torch.int32, device="npu")
torch_npu.npu_scatter_pa_kv_cache(new, new, keys, values, slots, cache_mode="Norm")
table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device="npu")
torch_npu.npu_fused_infer_attention_score(
    torch.randn(2, 8, 64, **half), keys.view(64, 128, 128), values.view(64, 128, 128), actual_seq_lengths=[1, 2],
    actual_seq_lengths_kv=[130, 70], block_table=table, block_size=128, num_heads=8, num_key_value_heads=2, scale=0.1,
    input_layout="TND")
latents, ropes = torch.randn(64, 128, 512, **half), torch.randn(64, 128, 64, **half)
torch_npu.npu_fused_infer_attention_score_v2(
    torch.randn(2, 8, 512, **half), latents, latents, query_rope=torch.randn(2, 8, 64, **half), key_rope=ropes,
    actual_seq_qlen=[1, 2], actual_seq_kvlen=[130, 70], block_table=table, block_size=128, num_query_heads=8,
    num_key_value_heads=1, softmax_scale=0.1, input_layout="TND")
named = torch.full((3, 1, 4), -1, dtype=torch.int32, device="npu")
named[0, 0, :3] = torch.tensor([1, 129, 7], dtype=torch.int32)
named[2, 0, :2] = torch.tensor([3, 69], dtype=torch.int32)
lengths = [torch.tensor(each, dtype=torch.int32, device="npu") for each in ([1, 3], [130, 70])]
torch_npu.npu_sparse_flash_attention(
    torch.randn(3, 8, 512, **half), latents.unsqueeze(2), latents.unsqueeze(2), named, 0.1, block_table=table,
    actual_seq_lengths_query=lengths[0], actual_seq_lengths_kv=lengths[1], query_rope=torch.randn(3, 8, 64, **half),
    key_rope=ropes.unsqueeze(2), sparse_block_size=1, layout_query="TND", layout_kv="PA_BSND", sparse_mode=3, attention_mode=2)
torch_npu.npu_kv_rmsnorm_rope_cache(
    torch.randn(3, 1, 1, 576, **half), torch.ones(512, **half), *torch.rand(2, 3, 1, 1, 64, **half),
    torch.tensor([5, -1, 4000], device="npu"), ropes.unsqueeze(2), latents.unsqueeze(2), cache_mode="PA")
torch.nn.functional.embedding(torch.tensor([4, 9], device="npu"), torch.randn(1000, 64, **half))
counts = torch.tensor([2, 0, 3, 0], device="npu")
x, weights = torch.randn(5, 64, **half), torch.randn(4, 64, 32, **half)
torch_npu.npu_grouped_matmul([x], [weights], group_list=counts, split_item=2, group_type=0, group_list_type=1)
torch.randn(2, 32, **half).addmm_(torch.randn(2, 64, **half), weights[0])
wide = {"dtype": torch.bfloat16, "device": "npu"}
numbers = [torch.tensor(each, dtype=torch.int32, device="npu") for each in ([1, 2], [7, 3, 9])]
torch_npu.npu_recurrent_gated_delta_rule(
    *(torch.randn(3, heads, 64, **wide) for heads in (2, 2, 4)), torch.zeros(50, 4, 64, 64, **wide),
    beta=torch.ones(3, 4, **wide), scale=1.0, actual_seq_lengths=numbers[0], ssm_state_indices=numbers[1])
torch.npu.synchronize()
"""
    path = tmp_path / "trace.json"
    done = run("run", "--trace", str(path), "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    arguments_of = {
        event["name"]: event["args"] for event in tracing.events(path) if event["cat"] == "operator"
    }
    row = 2 * 64 * 2  # bytes of a token's keys
    assert arguments_of["aclnnScatterPaKvCache"]["bytes"] == 2 * 2 * 3 * row + 3 * 4
    attention, latent = (
        arguments_of["aclnnFusedInferAttentionScoreV3"],
        arguments_of["aclnnFusedInferAttentionScoreV4"],
    )
    keys, queries = 2 * (130 + 70) * row, 2 * 2 * 8 * 64 * 2
    # Sequence lengths, block table and sums besides.
    assert keys + queries <= attention["bytes"] < keys + queries + 1000
    assert attention["flops"] == 4 * 8 * 64 * (130 + 70)
    # Latents are read as keys and as values.
    keys, queries = (512 + 64 + 512) * (130 + 70) * 2, (512 + 64 + 512) * 2 * 8 * 2
    assert keys + queries <= latent["bytes"] < keys + queries + 1000
    keys, queries = (512 + 64 + 512) * (3 + 2) * 2, (512 + 64 + 512) * 3 * 8 * 2  # the named tokens
    assert (
        keys + queries <= arguments_of["aclnnSparseFlashAttention"]["bytes"] < keys + queries + 1000
    )
    read, written = 3 * 576 + 512 + 2 * 3 * 64, 2 * 576  # One of three tokens has no slot.
    assert (
        2 * (read + written)
        <= arguments_of["aclnnKvRmsNormRopeCache"]["bytes"]
        < 2 * (read + written) + 100
    )
    state = 4 * 64 * 64 * 2
    # two are read and three written
    assert 5 * state <= arguments_of["aclnnRecurrentGatedDeltaRule"]["bytes"] < 5 * state + 5000
    assert arguments_of["aclnnEmbedding"]["bytes"] == 2 * 2 * 64 * 2 + 2 * 8
    (product,) = [arguments for name, arguments in arguments_of.items() if "GroupedMatmul" in name]
    assert product["flops"] == 2 * 5 * 64 * 32
    assert arguments_of["aclnnInplaceAddmm"]["flops"] == 2 * 2 * 64 * 32
    assert product["bytes"] == 2 * (5 * 64 + 2 * 64 * 32 + 5 * 32) + 4 * 8
