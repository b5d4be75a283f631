# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Missing functions refuse by their own name, up to a Python exception, and nothing computes
silently after it."""

import ctypes
import sys

import pytest
import torch
import torch_npu

CLASSES = ("not emulated", " (undefined on the device)", " (rule ", " (CANN refuses, inferred)")
# Each line of its output is "label: exception's text on one line", or "label: no error".
PRELUDE = """
import torch, torch_npu
def attempt(label, call):
    try:
        call()
        print(f"{label}: no error")
    except RuntimeError as error:
        print(f"{label}: {' / '.join(str(error).splitlines())}")
x = torch.ones(4, 6, device="npu")
half = torch.ones(2, 3, 2, 64, dtype=torch.float16, device="npu")
"""
REFUSED = (
    PRELUDE
    + """
attempt("removed", lambda: torch.nn.functional.silu(x))
attempt("never there", lambda: torch_npu.npu_dequant_bias(x.int(), x[0], None, None, output_dtype=half.dtype))
attempt("legacy", lambda: torch_npu.npu_nms_with_mask(x[:, :5], 0.5))
attempt("dtype", lambda: torch.zeros(3, dtype=torch.float8_e8m0fnu, device="npu"))
attempt("argument", lambda: torch_npu.npu_rms_norm(x, x[0, :3], 1e-6))
attempt("mixed", lambda: torch_npu.npu_rms_norm(x, x[0].half(), 1e-6))
fused = lambda *x, **options: torch_npu.npu_fused_infer_attention_score(*x, num_heads=2, input_layout="BSND", **options)
attempt("pse", lambda: fused(half, half, half, pse_shift=half))
attempt("mask", lambda: fused(half, half, half, sparse_mode=3))
attempt("float32", lambda: fused(half.float(), half.float(), half.float()))
short = half[..., :32].contiguous()
attempt("heads", lambda: torch_npu.npu_apply_rotary_pos_emb(short, short, *[short[:, :, :1].contiguous()] * 2))
attempt("group", lambda: torch_npu.npu_mm_all_reduce_base(x.half(), x.half().T.contiguous(), "not emulated"))
attempt("still works", lambda: print("sum:", (x + 1).sum().item()))
torch.npu.set_compile_mode(jit_compile=True)
attempt("jit", lambda: torch.nn.functional.relu(x))
"""
)
# Errors that depend on tensors' values: a stream that has met one has failed for good, as on a
# device.
VALUES = {
    "index": (
        'attempt("index", lambda: (x[torch.tensor([9]).npu()], torch.npu.synchronize()))',
        "aclnnIndex: index 9 is out of bounds for dimension 0 with size 4",
    ),
    "position": (
        """rows, cache = torch.ones(2, 64, device="npu"), torch.ones(4, 64, device="npu")
attempt("position", lambda: (torch_npu.npu_mrope(torch.tensor([0, 7]).npu(), rows, rows, cache, 64), torch.npu.synchronize()))""",
        "aclnnRopeWithSinCosCacheV2: position 7 is outside the cos/sin cache of 4 rows",
    ),
    "prolog": (
        """shapes = [(2, 6144), (6144, 1536), (1536, 192), (1, 128, 512), (6144, 576), (1536,), (512,), (2, 64), (2, 64)]
shapes += [(3, 16, 1, 512), (3, 16, 1, 64)]
given = [torch.zeros(shape).bfloat16().npu() for shape in shapes]
store = lambda: torch_npu.npu_mla_prolog_v3(*given, cache_index=torch.tensor([5, -1]).npu())
attempt("prolog", lambda: (store(), torch.npu.synchronize()))""",
        "aclnnMlaPrologV3WeightNz: cache_index has -1; it must be in [0, blocks * block_size)",
    ),
}
VALUES |= {
    name: (
        f"""pages, slots = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device="npu"), torch.tensor([0, 1, {slot}]).npu()
store = lambda: torch_npu.npu_scatter_pa_kv_cache(half[0], half[0], pages, pages.clone(), slots, cache_mode="Norm")
attempt("{name}", lambda: (store(), torch.npu.synchronize()))""",
        f"aclnnScatterPaKvCache: slot {slot} is {refusal}",
    )
    for name, slot, refusal in (
        ("slot", 99, "outside the cache"),
        ("negative slot", -1, "negative; allowed: 0 or more (rule scatter_pa_kv_cache.slots, "),
    )
}
VALUES |= {
    name: (
        f"""index = torch.tensor({index}).npu()
attempt("{name}", lambda: ({call}, torch.npu.synchronize()))""",
        f"{operator}: indices has values from {values}; allowed: 0 to {limit}",
    )
    for name, index, call, operator, values, limit in (
        (
            "row",
            [[3], [-1]],
            "torch_npu.npu_scatter_nd_update_(x, index, x[:2])",
            "aclnnScatterNdUpdate",
            "-1 to 3",
            3,
        ),
        (
            "cell",
            [[3, 6]],
            "torch_npu.npu_scatter_nd_update_(x, index, x[0, :1])",
            "aclnnScatterNdUpdate",
            "6 to 6",
            5,
        ),
        (
            "start",
            [0, -2, 0, 0],
            "torch_npu.scatter_update_(x, index, x[:, :2], 1)",
            "aclnnInplaceScatterUpdate",
            "-2 to 0",
            4,
        ),
        (
            "end",
            [0, 5, 0, 0],
            "torch_npu.scatter_update_(x, index, x[:, :2], 1)",
            "aclnnInplaceScatterUpdate",
            "0 to 5",
            4,
        ),
    )
}
ASYNCHRONOUS = (
    PRELUDE
    + """
attempt("kernel", lambda: (x[torch.tensor([9]).npu()], torch.npu.synchronize()))
attempt("later", lambda: print((x + 1).cpu()))
attempt("synchronize", torch.npu.synchronize)
"""
)


def lines(done):
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.fixture(scope="module")
def refusals(run):
    """All in one process, where each error comes at its call."""
    return lines(
        run(
            "run",
            "--without",
            "aclnnSilu,aclnnTan",
            "--",
            sys.executable,
            "-c",
            REFUSED,
            ASCEND_LAUNCH_BLOCKING="1",
        )
    )


@pytest.mark.parametrize(
    ("label", "named", "rest"),
    [
        ("removed", "aclnnSilu", "is not emulated"),
        ("never there", "aclnnDequantBias", "is not emulated"),
        ("legacy", "the legacy graph operator 'NMSWithMask'", ""),
        ("jit", "the legacy graph operator 'Relu'", ""),
        ("dtype", "aclnnInplaceZero", "does not compute in float8, HiF8 or float4"),
        ("argument", "aclnnRmsNorm", "gamma has shape [3], which is not the end of x's [4, 6]"),
        ("mixed", "aclnnRmsNorm", "gamma is Half (DT_FLOAT16) and self"),
        ("pse", "aclnnFusedInferAttentionScoreV3", "pse_shift"),
        ("mask", "aclnnFusedInferAttentionScoreV3", "sparse_mode 3 needs atten_mask"),
        ("float32", "aclnnFusedInferAttentionScoreV3", "Float"),
        ("heads", "aclnnApplyRotaryPosEmbV2", "32"),
    ],
)
def test_error_names_the_operator(refusals, label, named, rest):
    _, separator, message = refusals[label].partition(f"[ascend-emulator] {named}")
    assert separator
    assert rest in message
    assert "frame #" not in message


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("removed", "is not emulated"),
        ("jit", "is not emulated"),
        ("dtype", "(CANN refuses, inferred)"),
        ("argument", " (rule "),
        ("float32", " (rule "),
    ],
)
def test_error_names_its_class(refusals, label, text):
    assert text in refusals[label]
    assert sum(refusals[label].count(each) for each in CLASSES) == 1


def test_the_class_does_not_follow_from_the_text(refusals):
    assert 'hcom is "not emulated"; NPU 0 has no communicator' in refusals["group"]
    assert " (CANN refuses, inferred)" in refusals["group"]


@pytest.mark.parametrize("label", VALUES)
def test_error_that_depends_on_values(run, label):
    script, named = VALUES[label]
    seen = lines(
        run("run", "--", sys.executable, "-c", PRELUDE + script, ASCEND_LAUNCH_BLOCKING="1")
    )
    assert named in seen[label]
    assert sum(seen[label].count(each) for each in CLASSES[1:3]) == 1


def test_an_error_at_its_call_leaves_the_rest_working(refusals):
    assert refusals["still works"] == "no error"
    assert refusals["sum"] == "48.0"


def test_a_failed_stream_stays_failed(run):
    """Operators after the error are not computed, and every wait raises it again."""
    seen = lines(run("run", "--", sys.executable, "-c", ASYNCHRONOUS))
    for label in ("kernel", "synchronize"):
        assert "aclnnIndex: index 9 is out of bounds for dimension 0 with size 4" in seen[label]
    assert "failed" in seen["later"]


def test_error_in_the_task_queue_is_raised_and_stops_the_queue(run):
    """torch_npu raises it once and then drops work silently; the emulator's synchronization keeps
    failing instead."""
    seen = lines(
        run(
            "run",
            "--without",
            "aclnnIndex",
            "--",
            sys.executable,
            "-c",
            ASYNCHRONOUS,
            TASK_QUEUE_ENABLE="2",
        )
    )
    assert "aclnnIndex" in seen["kernel"]
    assert "failed" in seen["later"]
    assert "aclnnIndex failed earlier" in seen["synchronize"]


def test_missing_operators_are_refused_at_once_in_this_process():
    x = torch.ones(4, 6, dtype=torch.int32, device="npu")
    scale = torch.ones(6, device="npu")
    with pytest.raises(RuntimeError, match="aclnnDequantBias is not emulated"):
        torch_npu.npu_dequant_bias(x, scale, None, None, output_dtype=torch.half)
    assert torch.ones(3, device="npu").sum().item() == 3


def test_copies_beyond_an_allocation_are_refused():
    x, host = (
        torch.zeros(1 << 20, dtype=torch.uint8, device="npu"),
        torch.ones(64 << 20, dtype=torch.uint8),
    )
    torch.npu.synchronize()
    library, to_device = ctypes.CDLL("libascendcl.so"), 1
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    sizes = ctypes.c_size_t(host.numel()), ctypes.c_size_t(host.numel())
    assert (
        library.aclrtMemcpy(
            ctypes.c_void_p(x.data_ptr()),
            sizes[0],
            ctypes.c_void_p(host.data_ptr()),
            sizes[1],
            to_device,
        )
        != 0
    )
    message = library.aclGetRecentErrMsg().decode()
    assert "are allocated" in message
    assert message.endswith(" (CANN refuses, inferred)")
    assert (
        library.aclrtMemcpy(
            ctypes.c_void_p(host.data_ptr()),
            sizes[0],
            ctypes.c_void_p(host.data_ptr()),
            sizes[1],
            to_device,
        )
        != 0
    )
    assert "not device memory" in library.aclGetRecentErrMsg().decode()


# Each on an NPU of its own, whose stream fails.
UNDEFINED = """
import torch, torch_npu, torch.nn.functional as F
w, i = torch.rand(10, 4), torch.tensor
target = i([0, 1, 2, 3, 0, 1, 2, 3, 0, 9])
logs = torch.randn(5, 1, 4).log_softmax(-1)
calls = [
    lambda: F.embedding(i([3, 11]).npu(), w.npu()),
    lambda: w.npu().index_select(1, i([3, -9]).npu()),
    lambda: torch_npu.npu_gather_sparse_index(w.npu(), i([[3, 11]]).npu()),
    lambda: F.nll_loss(w.npu(), target.npu()),
    lambda: F.one_hot(i([0, 9]).npu(), 4),
    lambda: F.multilabel_margin_loss(w[:1].npu(), i([[0, 9, -1, -1]]).npu()),
    lambda: F.ctc_loss(logs.npu(), i([[1, 9]]).npu(), i([5]), i([2])),
    lambda: torch.repeat_interleave(torch.ones(2).npu(), i([-1, 2]).npu()),
]
for npu, call in enumerate(calls):
    torch.npu.set_device(npu)
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError as error:
        print(*(line for line in str(error).splitlines() if "ascend-emulator" in line), "")
    else:
        print("no error")
"""


def test_values_that_are_out_of_range_are_named(run):
    """With the index, the size, and how to find the call. ATen's text lacks one of the first two; of
    the last two functions ATen reads, or writes, other memory."""
    count = UNDEFINED.count("    lambda:")
    command = ("run", "--npus", str(count), "--memory", "64MiB", "--", sys.executable, "-c")
    done = run(*command, UNDEFINED, TASK_QUEUE_ENABLE="0")
    printed = done.stdout.splitlines()
    wanted = [
        "aclnnEmbedding: indices has the value 11 at position 1, which is out of range; allowed: 0 to 9",
        "aclnnIndexSelect: index has the value -9 at position 1, which is out of range; allowed: 0 to 3",
        "aclnnGatherV3: index has the value 11 at position 1, which is out of range; allowed: 0 to 9",
        "aclnnNLLLoss: target has the value 9 at position 9, which is out of range; allowed: 0 to 3",
        "aclnnOneHot: self has the value 9 at position 1, which is out of range; allowed: 0 to 3",
        "aclnnMultilabelMarginLoss: target has the value 9 at position 1, which is out of range;",
        "aclnnCtcLoss: targets has the value 9 at position 1, which is out of range; allowed: 0 to 3",
        "aclnnRepeatInterleave: repeats has the value -1, which is out of range; allowed: from 0",
    ]
    assert len(printed) == len(wanted) == count, done.stderr
    for line, text in zip(printed, wanted, strict=True):
        line = (
            line.strip() or done.stderr
        )  # Some errors of torch_npu leave CANN's text to a warning.
        assert text in line
        assert " (undefined on the device); ASCEND_LAUNCH_BLOCKING=1 raises it at its call" in line


def test_exhausted_memory_names_the_option(run):
    """Once, when torch_npu has given up: it frees what it caches, and asks again."""
    script = """
import torch, torch_npu
kept = torch.empty(20 << 20, dtype=torch.uint8, device="npu")
del kept
torch.empty(50 << 20, dtype=torch.uint8, device="npu")  # frees what is cached
for _ in range(2):
    try:
        torch.empty(80 << 20, dtype=torch.uint8, device="npu")
    except torch.OutOfMemoryError:
        print("out of memory")
"""
    done = run("run", "--memory", "64MiB", "--", sys.executable, "-c", script)
    assert done.stdout == "out of memory\nout of memory\n", done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "is out of memory" in each]
    assert line == (
        "ascend-emulator: NPU 0 is out of memory: 0.08 GiB asked for, 0.06 of 0.06 GiB free; fix:"
        " ascend-emulator run --memory SIZE, or pytest --npu-memory SIZE, with more"
    )


def test_an_npu_that_is_there_and_not_visible(run):
    script = "import torch, torch_npu; torch.npu.set_device(1)"
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    done = run("run", "--npus", "2", "--", sys.executable, "-c", script, **visible)
    assert "device 1 asked for, 1 present: ASCEND_RT_VISIBLE_DEVICES is '1'" in done.stderr
