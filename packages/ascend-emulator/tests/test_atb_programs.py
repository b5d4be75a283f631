# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ATB's operators in programs of their own: on 310P, and where they refuse."""

import sys
import textwrap

import pytest

FRACTAL = """
    import torch, torch_npu
    torch_npu.npu.set_compile_mode(jit_compile=False)
    def fractal(x, unit=16):
        return x.unflatten(-1, (-1, unit)).transpose(-3, -2).contiguous()
    def expected(query, key, value, bias=0):
        scores = torch.einsum("tnd,lnd->ntl", query.double(), key.double()) / 4 + bias
        return torch.einsum("ntl,lnd->tnd", scores.softmax(-1), value.double())
    def close(ours, theirs):
        torch.testing.assert_close(ours.cpu().double(), theirs, atol=6e-3, rtol=6e-3)
    key, value = torch.randn(20, 2, 16).half(), torch.randn(20, 2, 16).half()
    plain = [torch.zeros(3, 2, 16, 16).half().npu() for _ in range(2)]
    caches = [torch_npu.npu_format_cast(x, 29) for x in plain]
    slots = torch.cat([torch.arange(32, 48), torch.arange(4)]).int()
    torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *caches, slots.npu())
    table, length = torch.tensor([[2, 0]]).int().npu(), torch.tensor([20]).int()
    query, out = torch.randn(1, 2, 16).half(), torch.empty(1, 2, 16).half().npu()
    torch_npu._npu_paged_attention(query.npu(), *caches, 2, 2, 0.25, table, length, out)
    close(out, expected(query, key, value))
    query, out = torch.randn(20, 2, 16).half(), torch.empty(20, 2, 16).half().npu()
    hidden = torch.full((20, 20), -60000.0).triu(1)
    mask = torch.zeros(1, 32, 32)
    mask[0, :20, :20] = hidden
    given = [x.npu() for x in (query, key, value)]
    torch_npu._npu_flash_attention(*given, fractal(mask.half()).npu(), length, 0.25, 2, 2, out)
    close(out, expected(query, key, value, hidden.double()))
    for count in (20, 7):
        out = torch.empty(count, 2, 16).half().npu()
        given = query[-count:].npu(), *caches, table, length, mask.half().npu(), torch.tensor([count]).int()
        torch_npu._npu_paged_attention_splitfuse_v2(*given, 2, 2, 0.25, out=out)
        close(out, expected(query[-count:], key, value, hidden[-count:].double()))
    try:
        torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *plain, slots.npu())
        print("written")
    except Exception as error:
        print("plain:", error)
    try:
        given = [x.bfloat16().npu() for x in (query, key, value)]
        torch_npu._npu_flash_attention(*given, mask.npu(), length, 0.25, 2, 2, out)
        print("computed")
    except Exception as error:
        print("bfloat16:", error)
"""


def test_on_310p_caches_and_masks_are_fractal(run):
    done = run(
        "run",
        "--soc",
        "Ascend310P3",
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(FRACTAL),
        ASCEND_LAUNCH_BLOCKING="1",
    )
    assert done.returncode == 0, done.stderr
    assert "plain: " in done.stdout
    assert "key_cache is not in FRACTAL_NZ, as KV caches of this chip are; fix:" in done.stdout
    assert (
        "atb::SelfAttention: query is BFloat16 (DT_BFLOAT16); Ascend310P3 does not compute in"
        " bfloat16" in done.stdout
    )


REFUSED = """
    import torch, torch_npu
    n = lambda *shape: torch.zeros(*shape).half().npu()
    query, cache, table, length = n(2, 4, 16), n(3, 16, 2, 16), torch.zeros(2, 2).int().npu(), torch.ones(2).int()
    def attempt(label, function):
        try:
            function()
            torch.npu.synchronize()
            print(f"{label}: no error")
        except Exception as error:
            print(f"{label}: " + " ".join(str(error).split()))
    atb, paged_v2 = torch_npu.atb, {"value_cache": cache, "num_kv_heads": 2, "num_heads": 4, "out": query}
    paged = lambda *rest: torch_npu._npu_paged_attention(query, cache, cache, *rest, length, n(2, 4, 16))
    attempt("mask type", lambda: atb._npu_paged_attention_v2(query, cache, table, [1, 1], mask_type=1, **paged_v2))
    attempt("heads", lambda: paged(3, 4, 0.5, table))
    attempt("host", lambda: torch_npu._npu_paged_attention(query.cpu(), cache, cache, 2, 4, 0.5, table, length, query))
    v2 = {"mask": n(256, 256), "slopes": n(4), "num_heads": 4, "num_kv_heads": 4, "out": n(2, 4, 16)}
    attempt("left", lambda: atb._npu_flash_attention_v2(query, query, query, [2], mask_type=6, **v2))
    attempt("compressed", lambda: atb._npu_flash_attention_v2(query, query, query, [2], mask_type=4, **v2))
"""
REFUSED_LATER = {
    "blocks": (
        "paged(2, 4, 0.5, torch.full_like(table, 9))",
        "atb::PagedAttention: block_table names block 9 of 3",
    ),
    "pages": (
        (
            "torch_npu._npu_paged_attention(query, cache, cache, 2, 4, 0.5, table, length * 40,"
            " n(2, 4, 16))"
        ),
        "atb::PagedAttention: request 0 has 40 keys, and block_table pages for 32",
    ),
}
REFUSED_LATENT = {
    "cache mode": ("cache_mode='int8_nzcache'", "AtbMLA: cache_mode (1 krope_ctkv) is 2"),
    "mask": ("mask_type='mask_type_spec'", "AtbMLA: mask_type (0 undefined) is 1"),
}


def attempts(run, script):
    """Label to what was raised, and the program's standard error."""
    done = run(
        "run", "--", sys.executable, "-c", textwrap.dedent(script), ASCEND_LAUNCH_BLOCKING="1"
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line) | {
        "": done.stderr
    }


def test_what_is_not_there_refuses_by_its_name(run):
    seen = attempts(run, REFUSED)
    assert "atb::PagedAttention: 0 input tensors" in seen["mask type"]
    assert (
        "atb::PagedAttention: key_cache has shape [3, 16, 2, 16]; it must be [blocks, block_size,"
        " 3, head_size]" in seen["heads"]
    )
    assert (
        "atb::PagedAttention: a tensor of Half (DT_FLOAT16) is in the host's memory" in seen["host"]
    )
    assert "atb::SelfAttention: mask_type 6 is not emulated" in seen["left"]
    assert "atb::SelfAttention: mask is not the compressed ALiBi mask" in seen["compressed"]


@pytest.mark.parametrize("label", REFUSED_LATER)
def test_values_that_are_refused(run, label):
    call, expected = REFUSED_LATER[label]
    head = REFUSED[: REFUSED.index('    attempt("mask type"')]
    assert expected in attempts(run, head + f'    attempt("{label}", lambda: {call})\n')[label]


@pytest.mark.parametrize("label", REFUSED_LATENT)
def test_latent_forms_that_are_refused(run, label):
    """torch_npu does not raise the reason of these; it is on standard error."""
    option, expected = REFUSED_LATENT[label]
    head = REFUSED[: REFUSED.index('    attempt("mask type"')]
    call = (
        "atb.npu_multi_head_latent_attention(query, query, cache, cache, table, [1, 1], 4, 1.0, 2,"
        f" {option})"
    )
    seen = attempts(run, head + f'    attempt("{label}", lambda: {call})\n')
    assert "call AtbMLAGetWorkspaceSize failed" in seen[label]
    assert f"[ascend-emulator] {expected}" in seen[""]


def test_an_operator_without_an_emulation_refuses_by_its_name(run):
    script = """
        import torch, torch_npu
        x = torch.zeros(1, 8).half().npu()
        try:
            torch_npu.atb.npu_mla_preprocess(*[x] * 14, x, x, q_out0=x, kv_cache_out0=x, q_out1=x, kv_cache_out1=x)
            print("computed")
        except Exception as error:
            print(error)
    """
    done = run(
        "run", "--", sys.executable, "-c", textwrap.dedent(script), ASCEND_LAUNCH_BLOCKING="1"
    )
    assert "call AtbMLAPreprocessGetWorkspaceSize failed" in done.stdout
    assert "[ascend-emulator] AtbMLAPreprocess is not emulated" in done.stderr


def test_only_atb_accepts_host_tensors(run):
    """Anything else that is given one refuses it, as before."""
    script = """
        import ctypes, torch
        x = torch.ones(3, device="npu")
        library, host = ctypes.CDLL("libascendcl.so"), torch.ones(3)
        library.aclCreateTensor.restype = ctypes.c_void_p
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        dims, strides = (ctypes.c_int64 * 1)(3), (ctypes.c_int64 * 1)(1)
        count, none = ctypes.c_uint64(1), ctypes.c_int64(0)
        form = dims, count, 0, strides, none, 2, dims, count
        make = lambda t: ctypes.c_void_p(library.aclCreateTensor(*form, ctypes.c_void_p(t.data_ptr())))
        ours, theirs, bytes, executor = make(host), make(x), ctypes.c_uint64(), ctypes.c_void_p()
        assert library.aclnnNegGetWorkspaceSize(ours, theirs, ctypes.byref(bytes), ctypes.byref(executor)) != 0
        print(library.aclGetRecentErrMsg().decode())
        assert library.aclDestroyTensor(ours) == 0 and library.aclDestroyTensor(theirs) == 0
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert "aclnnNeg: " in done.stdout
    assert "not device memory" in done.stdout
