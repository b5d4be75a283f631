"""What is not there refuses by its own name, up to a Python exception, and nothing computes silently after it."""

import ctypes
import sys

import pytest
import torch

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
attempt("never there", lambda: torch.nn.functional.conv1d(x[None], x[None, :, :2]))
attempt("legacy", lambda: torch_npu.npu_transpose(x, (1, 0)))
attempt("compiled", lambda: torch_npu.npu_confusion_transpose(x, (1, 0), (6, 4), True))
attempt("dtype", lambda: torch.zeros(3, dtype=torch.float8_e8m0fnu, device="npu"))
attempt("argument", lambda: torch_npu.npu_rms_norm(x, x[0, :3], 1e-6))
attempt("mixed", lambda: torch_npu.npu_rms_norm(x, x[0].half(), 1e-6))
attempt("index", lambda: x[torch.tensor([9]).npu()])
fused = lambda *x, **options: torch_npu.npu_fused_infer_attention_score(*x, num_heads=2, input_layout="BSND", **options)
attempt("pse", lambda: fused(half, half, half, pse_shift=half))
attempt("mask", lambda: fused(half, half, half, sparse_mode=3))
attempt("float32", lambda: fused(half.float(), half.float(), half.float()))
attempt("heads", lambda: torch_npu.npu_apply_rotary_pos_emb(*[half[..., :32].contiguous()] * 4))
rows, cache = torch.ones(2, 64, device="npu"), torch.ones(4, 64, device="npu")
attempt("position", lambda: torch_npu.npu_mrope(torch.tensor([0, 7]).npu(), rows, rows, cache, 64))
pages, slots = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device="npu"), torch.tensor([0, 1, 99]).npu()
attempt("slot", lambda: torch_npu.npu_scatter_pa_kv_cache(half[0], half[0], pages, pages.clone(), slots, cache_mode="Norm"))
attempt("still works", lambda: print("sum:", (x + 1).sum().item()))
torch.npu.set_compile_mode(jit_compile=True)
attempt("jit", lambda: torch.nn.functional.relu(x))
"""
)
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
def refused(run):
    """All in one process, where each error comes at its call."""
    return lines(run("run", "--without", "aclnnSilu,aclnnTan", "--", sys.executable, "-c", REFUSED, ASCEND_LAUNCH_BLOCKING="1"))


@pytest.mark.parametrize(
    ("label", "named"),
    {
        "removed": "aclnnSilu is not emulated",
        "never there": "aclnnConvolution is not emulated",
        "legacy": "the legacy graph operator 'Transpose'",
        "compiled": "the legacy graph operator 'ConfusionTransposeD'",
        "jit": "the legacy graph operator 'Relu'",
        "dtype": "aclnnInplaceZero: aclDataType 37 is not emulated",
        "argument": "aclnnRmsNorm: gamma has shape [3], which is not the end of x's [4, 6]",
        "mixed": "aclnnRmsNorm: gamma is Half and x Float; they must be the same",
        "index": "aclnnIndex: index 9 is out of bounds for dimension 0 with size 4",
        "pse": "aclnnFusedInferAttentionScoreV3: pse_shift is not emulated",
        "mask": "aclnnFusedInferAttentionScoreV3: sparse_mode 3 needs atten_mask",
        "float32": "aclnnFusedInferAttentionScoreV3: dtype Float",
        "heads": "aclnnApplyRotaryPosEmbV2: head size 32; 64 and 128 are allowed",
        "position": "aclnnRopeWithSinCosCacheV2: position 7 is outside the cos/sin cache of 4 rows",
        "slot": "aclnnScatterPaKvCache: slot 99 is outside the cache",
    }.items(),
)
def test_error_names_the_operator(refused, label, named):
    assert f"[ascend-emulator] {named}" in refused[label]
    assert "frame #" not in refused[label].partition("[ascend-emulator]")[2]


def test_an_error_at_its_call_leaves_the_rest_working(refused):
    assert refused["still works"] == "no error"
    assert refused["sum"] == "48.0"


@pytest.fixture(scope="module")
def asynchronous(run):
    return {
        "kernel": run("run", "--", sys.executable, "-c", ASYNCHRONOUS),
        "removed": run("run", "--without", "aclnnIndex", "--", sys.executable, "-c", ASYNCHRONOUS, TASK_QUEUE_ENABLE="2"),
    }


@pytest.mark.parametrize("case", ["kernel", "removed"])
def test_error_in_the_queue_is_raised_and_nothing_computes_after_it(asynchronous, case):
    """torch_npu raises it once and then drops work silently; the emulator's synchronization keeps failing instead."""
    seen = lines(asynchronous[case])
    assert "the current working operator name is aclnnIndex" in seen["kernel"]
    reason = {"kernel": "index 9 is out of bounds for dimension 0 with size 4", "removed": "is not emulated"}[case]
    assert reason in asynchronous[case].stderr.split("[ascend-emulator] aclnnIndex")[1]
    assert "failed" in seen["later"]
    assert "aclnnIndex failed earlier" in seen["synchronize"]


def test_operators_that_were_never_there_refuse_at_once_in_this_process_too():
    with pytest.raises(RuntimeError, match="aclnnConvolution is not emulated"):
        torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4, device="npu"), torch.ones(1, 1, 2, 2, device="npu"))
    assert torch.ones(3, device="npu").sum().item() == 3


class Calls:
    """CANN's C interface, for what no torch function would do."""

    def __init__(self):
        self.library = ctypes.CDLL("libopapi.so")
        self.library.aclCreateTensor.restype = ctypes.c_void_p
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def tensor(self, tensor, shape):
        dims, strides = ((ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, torch.empty(shape).stride()))
        rank, offset, data = ctypes.c_uint64(len(shape)), ctypes.c_int64(0), ctypes.c_void_p(tensor.data_ptr())
        return ctypes.c_void_p(self.library.aclCreateTensor(dims, rank, 0, strides, offset, 2, dims, rank, data))

    def silu(self, source, result):
        """The status of both phases and the message of the last one that failed."""
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        prepared = self.library.aclnnSiluGetWorkspaceSize(source, result, ctypes.byref(size), ctypes.byref(executor))
        status = prepared or self.library.aclnnSilu(None, size, executor, None)
        return status, (self.library.aclGetRecentErrMsg() or b"").decode()


def test_output_of_the_wrong_shape_is_refused_not_resized():
    x, y = torch.randn(6, device="npu"), torch.zeros(8, device="npu")
    torch.npu.synchronize()
    calls = Calls()
    assert calls.silu(calls.tensor(x, (6,)), calls.tensor(y, (6,)))[0] == 0
    torch.testing.assert_close(y[:6], torch.nn.functional.silu(x))
    before = y.cpu()
    for shape in ((5,), (2, 3), (8,), (0,)):
        status, message = calls.silu(calls.tensor(x, (6,)), calls.tensor(y, shape))
        assert status != 0
        assert message.startswith("[ascend-emulator] aclnnSilu: ")
        assert torch.equal(y.cpu(), before)


def test_missing_arguments_and_host_memory_are_refused():
    x, host = torch.randn(6, device="npu"), torch.randn(6)
    calls = Calls()
    good = calls.tensor(x, (6,))
    assert "a required argument is null" in calls.silu(good, None)[1]
    assert "not device memory" in calls.silu(good, calls.tensor(host, (6,)))[1]


def test_copies_beyond_an_allocation_are_refused():
    x, host = torch.zeros(1 << 20, dtype=torch.uint8, device="npu"), torch.ones(64 << 20, dtype=torch.uint8)
    torch.npu.synchronize()
    library, to_device = ctypes.CDLL("libascendcl.so"), 1
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    sizes = ctypes.c_size_t(host.numel()), ctypes.c_size_t(host.numel())
    assert (
        library.aclrtMemcpy(ctypes.c_void_p(x.data_ptr()), sizes[0], ctypes.c_void_p(host.data_ptr()), sizes[1], to_device) != 0
    )
    assert "are allocated" in library.aclGetRecentErrMsg().decode()
    assert (
        library.aclrtMemcpy(ctypes.c_void_p(host.data_ptr()), sizes[0], ctypes.c_void_p(host.data_ptr()), sizes[1], to_device)
        != 0
    )
    assert "not device memory" in library.aclGetRecentErrMsg().decode()
