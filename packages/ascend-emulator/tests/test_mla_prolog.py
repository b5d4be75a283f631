# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MLA prolog, against references in float64."""

import re

import pytest
import torch
import torch_npu
from comparisons import close


def rms(x, gamma, epsilon=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * gamma


def rotate(x, cos, sin):
    x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize("weights", ["ND", "NZ"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "int8"])
def test_mla_prolog(small, mode, version, weights):
    hidden, low, size = (7168, 1536, 128) if version == 2 else (1024, 2048, 192)
    tokens, heads, latent, rotary = 5, 2, 512, 64
    dtype = torch.int8 if small else torch.bfloat16

    def weight(*shape):
        return (
            torch.randint(-100, 100, shape, dtype=dtype)
            if small
            else (torch.randn(shape) / shape[0] ** 0.5).to(dtype)
        )

    x, down, up, down_key = (
        weight(tokens, hidden),
        weight(hidden, low),
        weight(low, heads * (size + rotary)),
        weight(hidden, latent + rotary),
    )
    up_key = (torch.randn(heads, size, latent) / size**0.5).bfloat16()
    gammas = torch.rand(low).bfloat16() + 0.5, torch.rand(latent).bfloat16() + 0.5
    sin, cos = torch.rand(2, tokens, rotary).bfloat16()
    index = torch.tensor([0, 31, 16, 3, 40])
    caches = torch.zeros(3, 16, 1, latent).to(dtype), torch.zeros(3, 16, 1, rotary).bfloat16()
    scales = {}
    if small:
        scales = {
            "dequant_scale_x": torch.rand(tokens, 1) * 1e-2,
            "dequant_scale_w_dq": torch.rand(1, low) * 1e-2,
            "dequant_scale_w_uq_qr": torch.rand(1, heads * (size + rotary)) * 1e-3,
            "dequant_scale_w_dkv_kr": torch.rand(1, latent + rotary) * 1e-2,
            "quant_scale_ckv": torch.full((1, latent) if version == 2 else (1,), 40.0),
        }
    ours = [t.npu() for t in caches]
    given = [t.npu() for t in (x, down, up, up_key, down_key, *gammas, sin, cos)]
    if weights == "NZ":
        torch.npu.config.allow_internal_format = True
        for place in (1, 2, 4):
            given[place] = torch_npu.npu_format_cast(given[place], 29)
        torch.npu.config.allow_internal_format = False
    options = {name: t.npu() for name, t in scales.items()} | {"cache_mode": mode}
    if version == 2:
        query, rope, _, _, query_scale = torch_npu.npu_mla_prolog_v2(
            *given, index.npu(), *ours, **options
        )
    else:
        options |= {
            "cache_index": index.npu(),
            "weight_quant_mode": 2 if small else 0,
            "kv_cache_quant_mode": 1 if small else 0,
        }
        query, rope, query_scale, *_ = torch_npu.npu_mla_prolog_v3(
            *given, *ours, query_quant_mode=int(small), **options
        )
    wide = x.double()

    def product(left, right, name, rows=None):
        out = left.double() @ right.double()
        return (
            out
            * (scales["dequant_scale_x"].double() if rows is None else rows)
            * scales[name].double()
            if small
            else out
        )

    query_low = rms(product(wide, down, "dequant_scale_w_dq"), gammas[0].double())
    if small:
        rows = query_low.abs().amax(-1, keepdim=True) / 127
        query_low = (query_low / rows).round()
    else:
        rows, query_low = None, query_low.bfloat16()
    both = product(query_low, up, "dequant_scale_w_uq_qr", rows).view(tokens, heads, size + rotary)
    absorbed = torch.einsum("tnd,ndl->tnl", both[..., :size].bfloat16().double(), up_key.double())
    turned = rotate(both[..., size:], cos.double()[:, None], sin.double()[:, None])
    if small:
        factor = query_scale.cpu().double()
        close(query_scale, absorbed.abs().amax(-1, keepdim=True) / 127, ulps=1e5)
        torch.testing.assert_close(
            query.cpu().double() * factor, absorbed, atol=2 * float(factor.max()), rtol=0
        )
        torch.testing.assert_close(rope.cpu().double() * factor / 40, turned, atol=2e-2, rtol=2e-2)
    else:
        close(query, absorbed, ulps=8)
        close(rope, turned, ulps=8)
    keys = product(wide, down_key, "dequant_scale_w_dkv_kr")
    key = rms(keys[:, :latent], gammas[1].double())
    key = (key * 40).round().clamp(-128, 127) if small else key
    key_rope = rotate(keys[:, latent:], cos.double(), sin.double())
    for cache, rows, result in zip(caches, (key, key_rope), ours, strict=True):
        expected = torch.zeros(cache.shape).double()
        unit = 32 // cache.element_size() if mode == "PA_NZ" else rows.size(1)
        for slot, row in zip(index.tolist(), rows, strict=True):
            expected.view(3, -1, 16, unit)[slot // 16, :, slot % 16] = (
                row.view(-1, unit) if mode == "PA_NZ" else row
            )
        whole = cache.dtype == torch.int8
        torch.testing.assert_close(
            result.cpu().double(), expected, atol=1 if whole else 3e-2, rtol=0 if whole else 3e-2
        )


NAMES = [
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
]


NAMES += ["rope_sin", "rope_cos", "kv_cache", "kr_cache", "cache_index"]


FLOAT, INT8 = {"dtype": torch.float32}, {"dtype": torch.int8}


SMALL_UP = {
    "weight_uq_qr": INT8,
    "dequant_scale_w_uq_qr": {"size": (1, 384)} | FLOAT,
    "weight_quant_mode": 1,
}


def prolog(
    version=3,
    hidden=7168,
    low=1536,
    heads=2,
    size=128,
    latent=512,
    rotary=64,
    block=16,
    rows=(2,),
    **changes,
):
    """Call the operator with zeros; changes are options, or a tensor's dtype and shape."""
    shapes = [
        (*rows, hidden),
        (hidden, low),
        (low, heads * (size + rotary)),
        (heads, size, latent),
        (hidden, latent + rotary),
    ]
    shapes += [
        (low,),
        (latent,),
        (*rows, rotary),
        (*rows, rotary),
        (3, block, 1, latent),
        (3, block, 1, rotary),
        rows,
    ]
    dtypes = [torch.bfloat16] * 11 + [torch.int64]
    standard = {
        name: {"size": shape, "dtype": dtype}
        for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=True)
    }
    given = standard | {
        name: standard.get(name, {}) | change if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    given = {
        name: torch.zeros(**each, device="npu") if isinstance(each, dict) else each
        for name, each in given.items()
    }
    getattr(torch_npu, f"npu_mla_prolog_v{version}")(**given)
    torch.npu.synchronize()


def test_sizes_that_mla_prolog_takes():
    prolog()
    prolog(rows=(3, 17), hidden=5120, low=2048, size=192, block=1024, heads=1)
    prolog(**SMALL_UP)
    prolog(
        kv_cache=INT8,
        kr_cache=INT8,
        quant_scale_ckv={"size": (1, 512)} | FLOAT,
        quant_scale_ckr={"size": (1, 64)} | FLOAT,
        kv_cache_quant_mode=2,
        **SMALL_UP,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": 1536},
            "the last dimension of token_x is 1536; allowed: 1024, 2048, 3072, 4096,",
        ),
        ({"hidden": 6144, "version": 2}, "the last dimension of token_x is 6144; allowed: 7168"),
        ({"low": 1024}, "dimension 1 of weight_dq is 1024; allowed: 1536, 2048"),
        ({"latent": 256}, "dimension 2 of weight_uk is 256; allowed: 512"),
        ({"size": 64}, "dimension 1 of weight_uk is 64; allowed: 128, 192"),
        ({"rotary": 32}, "the last dimension of rope_cos is 32; allowed: 64"),
        ({"heads": 3}, "dimension 0 of weight_uk is 3; allowed: 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"block": 24}, "dimension 1 of kv_cache is 24; it must be a multiple of 16"),
        ({"block": 1040}, "dimension 1 of kv_cache is 1040; allowed: 16 to 1024"),
        ({"block": 64, "version": 2}, "dimension 1 of kv_cache is 64; allowed: 16, 128"),
        ({"rows": (1, 17), "version": 2}, "dimension 1 of token_x is 17; allowed: 0 to 16"),
        ({"low": 2048, "version": 2}, "dimension 1 of weight_dq is 2048; allowed: 1536"),
        (
            {"cache_mode": "TND"},
            "cache_mode is TND; allowed: PA_BSND, PA_NZ (rule mla_prolog_v3.not",
        ),
        (SMALL_UP | {"weight_quant_mode": 2}, "weight_quant_mode is 2; allowed: 1"),
        (
            {"kr_cache": {"size": (4, 16, 1, 64)}},
            "dimension 0 of kr_cache is 4 and dimension 0 of kv_cache is 3",
        ),
        (
            {"cache_index": {"size": (1, 2)}},
            "dimension 0 of cache_index is 1 and dimension 0 of token_x is 2",
        ),
        ({"cache_index": {"dtype": torch.int32}}, "cache_index"),
        ({"rmsnorm_gamma_cq": FLOAT}, "rmsnorm_gamma_cq"),
        ({"rope_cos": FLOAT}, "rope_cos"),
        ({"kv_cache": {"dtype": torch.float16}}, "kv_cache"),
        ({"token_x": {"dtype": torch.float16}}, "token_x"),
        ({"weight_quant_mode": 1}, "weight_quant_mode is 1; allowed: 0"),
        (SMALL_UP | {"weight_quant_mode": 0}, "weight_quant_mode is 0"),
        (
            SMALL_UP | {"dequant_scale_w_uq_qr": {"size": (1, 192)} | FLOAT},
            "the number of elements of dequant_scale_w_uq_qr is 192",
        ),
        ({"kv_cache_quant_mode": 1}, "kv_cache_quant_mode is 1"),
        ({"query_quant_mode": 1}, "query_quant_mode is 1; allowed: 0"),
        (
            {
                "kv_cache": INT8,
                "quant_scale_ckv": {"size": (1, 512)} | FLOAT,
                "kv_cache_quant_mode": 2,
            },
            "weight_uq_qr is BFloat16 (DT_BFLOAT16); allowed: Char",
        ),
    ],
)
def test_sizes_and_dtypes_that_mla_prolog_does_not_take(changes, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        prolog(**changes)


@pytest.mark.parametrize("name", ["kv_cache", "kr_cache", "token_x", "weight_uk", "rope_cos"])
def test_strided_tensors_are_refused(name):
    """Caches of blocks with gaps too, which npu_scatter_pa_kv_cache takes."""
    shapes = {
        "kv_cache": (3, 32, 1, 512),
        "kr_cache": (3, 32, 1, 64),
        "token_x": (2, 14336),
        "weight_uk": (2, 256, 512),
        "rope_cos": (2, 128),
    }
    whole = torch.zeros(shapes[name], dtype=torch.bfloat16, device="npu")
    half = whole.shape[1] // 2
    with pytest.raises(RuntimeError, match=rf"{name} has strides .*mla_prolog_v3\.contiguous"):
        prolog(**{name: whole[:, :half]})
