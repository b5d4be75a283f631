# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layouts and additions of the fused inference attention, against softmax(scale * q k^T + bias) v
in float64."""

import re

import pytest
import torch
import torch_npu
from fused_attention import (
    BATCH,
    COMPRESSED,
    GROUPS,
    HEADS,
    KEYS,
    QUERIES,
    SIZE,
    arranged,
    close,
    inputs,
    reference,
)

LAYOUTS = [
    "BSH",
    "BSND",
    "BNSD",
    "BNSD_BSND",
    "BSH_BNSD",
    "BSND_BNSD",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND",
    "NTD_TND",
    "TND_NTD",
]


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, mode):
    source, target = (layout.split("_") * 2)[:2]
    query, key, value = inputs()
    lengths = {}
    if source in ("TND", "NTD"):
        lengths = {
            "actual_seq_lengths": [QUERIES * (i + 1) for i in range(BATCH)],
            "actual_seq_lengths_kv": [KEYS * (i + 1) for i in range(BATCH)],
        }
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *(arranged(x, source).npu() for x in (query, key, value)),
        atten_mask=COMPRESSED.npu() if mode else None,
        sparse_mode=mode,
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout=layout,
        softmax_lse_flag=True,
        **lengths,
    )
    mask = (
        torch.arange(KEYS)[None] > torch.arange(QUERIES)[:, None] + KEYS - QUERIES if mode else None
    )
    wanted = [reference(q, k, v, 0.2, mask) for q, k, v in zip(query, key, value, strict=True)]
    close(out, arranged(torch.stack([o for o, _ in wanted]), target))
    sums = torch.stack([s for _, s in wanted])[..., None]
    close(lse, arranged(sums, "TND") if lengths else sums, ulps=2e4)


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_sparse_modes_have_no_effect_on_one_token(mode):
    query, key, value = inputs(queries=1)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=COMPRESSED.npu(),
        sparse_mode=mode,
        pre_tokens=3,
        next_tokens=0,
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout="BNSD",
    )
    close(
        out,
        torch.stack(
            [reference(q, k, v, 0.2)[0] for q, k, v in zip(query, key, value, strict=True)]
        ),
    )


def test_rows_past_a_length_are_zeros_without_a_sum():
    query, key, value = inputs()
    out, lse = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout="BNSD",
        actual_seq_lengths=[4, 6],
        actual_seq_lengths_kv=[9, 0],
        softmax_lse_flag=True,
    )
    expected, sums = reference(query[0, :, :4], key[0, :, :9], value[0, :, :9], 0.2)
    close(out[0, :, :4], expected)
    close(lse[0, :, :4, 0], sums, ulps=2e4)
    assert not out[0, :, 4:].any()
    assert not out[1].any()
    assert lse[0, :, 4:].isposinf().all()
    assert lse[1].isposinf().all()


def test_queries_that_see_no_key():
    query, key, value = (torch.randn(1, 2, length, 32).half() for length in (6, 4, 4))
    out, lse = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=COMPRESSED.npu(),
        sparse_mode=3,
        num_heads=2,
        scale=0.2,
        input_layout="BNSD",
        softmax_lse_flag=True,
    )
    mask = torch.arange(4)[None] > torch.arange(6)[:, None] - 2
    expected, _ = reference(query[0], key[0], value[0], 0.2, mask)
    assert not out[0, :, :2].any()
    assert lse[0, :, :2].isposinf().all()
    close(out[0, :, 2:], expected[:, 2:])


def test_position_bias_full_mask_and_quantized_output():
    query, key, value = inputs()
    bias, mask = (
        torch.randn(1, HEADS, QUERIES, KEYS).half(),
        torch.rand(BATCH, 1, QUERIES, KEYS) > 0.7,
    )
    mask[..., 0] = False
    scale, offset = torch.tensor([40.0]), torch.tensor([3.0])
    options = {
        "pse_shift": bias.npu(),
        "atten_mask": mask.npu(),
        "num_heads": HEADS,
        "num_key_value_heads": GROUPS,
    }
    options |= {"scale": 0.2, "input_layout": "BNSD"}
    wanted = torch.stack(
        [reference(query[i], key[i], value[i], 0.2, mask[i], bias[0])[0] for i in range(BATCH)]
    )
    ours = [x.npu() for x in (query, key, value)]
    close(torch_npu.npu_fused_infer_attention_score(*ours, **options)[0], wanted)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *ours, quant_scale2=scale.npu(), quant_offset2=offset.npu(), **options
    )
    assert out.dtype == torch.int8
    assert (out.cpu().double() - (wanted * 40 + 3).round().clamp(-128, 127)).abs().max() <= 1


def test_shared_prefix_and_lists_of_keys():
    query, key, value = inputs()
    prefix = torch.randn(2, 1, GROUPS, 5, SIZE).half()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        key_shared_prefix=prefix[0].npu(),
        value_shared_prefix=prefix[1].npu(),
        actual_shared_prefix_len=[3],
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout="BNSD",
    )
    keys, values = (
        torch.cat([p[0, :, :3].expand(BATCH, -1, -1, -1), x], 2)
        for p, x in zip(prefix, (key, value), strict=True)
    )
    close(
        out,
        torch.stack(
            [reference(q, k, v, 0.2)[0] for q, k, v in zip(query, keys, values, strict=True)]
        ),
    )


def test_left_padding():
    query, key, value = inputs()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        query_padding_size=torch.tensor([1]).npu(),
        kv_padding_size=torch.tensor([2]).npu(),
        actual_seq_lengths=[4, 5],
        actual_seq_lengths_kv=[9, 18],
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout="BNSD",
    )
    for i, (count, length) in enumerate(((4, 9), (5, 18))):
        rows, places = slice(QUERIES - 1 - count, QUERIES - 1), slice(KEYS - 2 - length, KEYS - 2)
        close(
            out[i, :, rows],
            reference(query[i, :, rows], key[i, :, places], value[i, :, places], 0.2)[0],
        )


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("offsets", [False, True])
def test_int8_keys_and_values(offsets, mode):
    query = torch.randn(BATCH, HEADS, 1, SIZE).half()
    key, value = torch.randint(-128, 128, (2, BATCH, GROUPS, KEYS, SIZE), dtype=torch.int8)
    shape = {0: (1, GROUPS, 1, SIZE), 1: (1, BATCH, KEYS), 2: (GROUPS,), 3: (BATCH, GROUPS, KEYS)}[
        mode
    ]
    dtype = torch.float16 if mode in (0, 2) else torch.float32
    factors = [(torch.rand(shape) * 0.02 + 0.01).to(dtype) for _ in range(2)]
    shifts = [(torch.randn(shape) * 5).to(dtype) for _ in range(2)] if offsets else [None, None]
    spread = {
        0: lambda x: x,
        1: lambda x: x[0][:, None, :, None],
        2: lambda x: x[None, :, None, None],
        3: lambda x: x[..., None],
    }[mode]
    keys, values = (
        (x.double() + (spread(shift).double() if offsets else 0)) * spread(factor).double()
        for x, factor, shift in zip((key, value), factors, shifts, strict=True)
    )
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        key_antiquant_scale=factors[0].npu(),
        value_antiquant_scale=factors[1].npu(),
        key_antiquant_offset=shifts[0].npu() if offsets else None,
        value_antiquant_offset=shifts[1].npu() if offsets else None,
        key_antiquant_mode=mode,
        value_antiquant_mode=mode,
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout="BNSD",
    )
    close(
        out,
        torch.stack(
            [reference(q, k, v, 0.2)[0] for q, k, v in zip(query, keys, values, strict=True)]
        ),
    )


@pytest.mark.parametrize(
    ("mode", "shape", "dtype", "named"),
    [
        (0, (1, GROUPS, 1, SIZE - 1), torch.float16, "of key has shape .*antiquant mode 0 it must"),
        (0, (1, GROUPS, 1, SIZE), torch.float32, r"of key is Float \(DT_FLOAT\); allowed: Half"),
        (1, (1, BATCH, KEYS - 1), torch.float32, "antiquant mode 1 it must be .2, 20."),
        (1, (1, BATCH, KEYS), torch.float16, r"of key is Half \(DT_FLOAT16\); allowed: Float"),
        (2, (GROUPS + 1,), torch.float16, "of key has shape .3.; with antiquant mode 2"),
        (3, (BATCH, GROUPS, KEYS - 1), torch.float32, "with antiquant mode 3 it must be"),
    ],
)
def test_factors_of_int8_keys_are_refused_at_the_call(mode, shape, dtype, named):
    cache = torch.zeros(BATCH, GROUPS, KEYS, SIZE, dtype=torch.int8).npu()
    factor = torch.ones(shape, dtype=dtype).npu()
    with pytest.raises(RuntimeError, match=named):
        torch_npu.npu_fused_infer_attention_score(
            torch.randn(BATCH, HEADS, 1, SIZE).half().npu(),
            cache,
            cache,
            key_antiquant_scale=factor,
            value_antiquant_scale=factor,
            key_antiquant_mode=mode,
            value_antiquant_mode=mode,
            num_heads=HEADS,
            num_key_value_heads=GROUPS,
            input_layout="BNSD",
        )
    torch.npu.synchronize()


@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
def test_learnable_sink(layout):
    query, key, value = (torch.randn(1, n, 12, 64).bfloat16() for n in (HEADS, GROUPS, GROUPS))
    sink = torch.randn(HEADS).bfloat16()
    source = layout.split("_")[0]
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *(arranged(x, source).npu() for x in (query, key, value)),
        learnable_sink=sink.npu(),
        num_query_heads=HEADS,
        num_key_value_heads=GROUPS,
        softmax_scale=0.3,
        input_layout=layout,
        actual_seq_qlen=[12],
        actual_seq_kvlen=[12],
        atten_mask=COMPRESSED.npu(),
        sparse_mode=3,
        return_softmax_lse=True,
    )
    expected, sums = reference(
        query[0], key[0], value[0], 0.3, torch.ones(12, 12, dtype=torch.bool).triu(1), sink=sink
    )
    close(out.transpose(0, 1), expected)
    close(lse[..., 0].t(), sums, ulps=2e4)


@pytest.mark.parametrize("version", [1, 2])
def test_workspace_of_a_capture(version):
    query, key, value = (x.npu() for x in inputs())
    if version == 1:
        call = torch_npu.npu_fused_infer_attention_score
        sizing = torch_npu._npu_fused_infer_attention_score_get_max_workspace
        options = {"num_heads": HEADS, "scale": 0.2, "softmax_lse_flag": True}
    else:
        call, sizing = (
            torch_npu.npu_fused_infer_attention_score_v2,
            torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace,
        )
        options = {"num_query_heads": HEADS, "softmax_scale": 0.2, "return_softmax_lse": True}
    options |= {"num_key_value_heads": GROUPS, "input_layout": "BNSD"}
    workspace = sizing(query, key, value, **options)
    out, lse = torch.empty_like(query), torch.empty(BATCH, HEADS, QUERIES, 1, device="npu")
    call.out(query, key, value, workspace=workspace, out=[out, lse], **options)
    wanted = call(query, key, value, **options)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


def test_prompt_and_incremental_attention():
    query, key, value = inputs()
    out = torch_npu.npu_prompt_flash_attention(
        query.npu(),
        key.npu(),
        value.npu(),
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale_value=0.2,
        input_layout="BNSD",
        actual_seq_lengths=[6, 5],
        atten_mask=COMPRESSED.bool().npu(),
        sparse_mode=2,
    )
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    close(out[0], reference(query[0], key[0], value[0], 0.2, mask)[0])
    close(out[1, :, :5], reference(query[1, :, :5], key[1], value[1], 0.2, mask[:5])[0])
    out = torch_npu.npu_incre_flash_attention(
        query[:, :, :1].contiguous().npu(),
        key.npu(),
        value.npu(),
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale_value=0.2,
        input_layout="BNSD",
        actual_seq_lengths=[7, 20],
    )
    for i, length in enumerate((7, 20)):
        close(out[i], reference(query[i, :, :1], key[i, :, :length], value[i, :, :length], 0.2)[0])


def test_query_may_be_a_slice_of_heads():
    """As vllm-ascend passes it in the prefill of latent attention."""
    query, key, value = inputs(size=SIZE)
    whole = torch.randn(BATCH, HEADS, QUERIES, SIZE + 16).half()
    whole[..., :SIZE] = query
    options = {"num_heads": HEADS, "num_key_value_heads": GROUPS, "scale": 0.2}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        whole.npu()[..., :SIZE], key.npu(), value.npu(), input_layout="BNSD", **options
    )
    for i in range(BATCH):
        close(out[i], reference(query[i], key[i], value[i], 0.2)[0])
    flat = [arranged(x, "TND").npu() for x in (whole, key, value)]
    lengths = {
        "actual_seq_lengths": [QUERIES, 2 * QUERIES],
        "actual_seq_lengths_kv": [KEYS, 2 * KEYS],
    }
    packed, _ = torch_npu.npu_fused_infer_attention_score(
        flat[0][..., :SIZE], *flat[1:], input_layout="TND", **lengths, **options
    )
    assert torch.equal(packed.cpu(), arranged(out.cpu(), "TND"))


def test_keys_and_values_of_different_sizes_are_refused():
    query, key, value = (x.npu() for x in inputs())
    with pytest.raises(RuntimeError, match="only the last size may differ"):
        torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            value[:, :, 1:].contiguous(),
            num_heads=HEADS,
            num_key_value_heads=GROUPS,
            input_layout="BNSD",
        )
    torch.npu.synchronize()


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_tensors_that_are_not_contiguous_are_refused(which):
    given = dict(zip(("query", "key", "value"), (x.npu() for x in inputs()), strict=True))
    given[which] = given[which].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(RuntimeError, match=rf"{which} has strides .* must be contiguous"):
        torch_npu.npu_fused_infer_attention_score(
            *given.values(),
            num_heads=HEADS,
            num_key_value_heads=GROUPS,
            input_layout="BNSD",
            scale=0.2,
        )


def test_one_token_has_no_correction_of_masked_rows():
    query, key, value = (x.npu() for x in inputs(queries=1))
    with pytest.raises(RuntimeError, match="inner_precise is 2; allowed: 0 to 1"):
        torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            num_heads=HEADS,
            num_key_value_heads=GROUPS,
            input_layout="BNSD",
            inner_precise=2,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_layout": "BSDN"}, ""),
        ({"num_key_value_heads": 3}, "4 heads over 3 key-value heads"),
        ({"sparse_mode": 3}, "sparse_mode 3 needs atten_mask"),
        ({"sparse_mode": 7}, "sparse_mode is 7; allowed: 0 to 4"),
        (
            {"actual_seq_lengths": [9]},
            "actual_seq_lengths of request 0 is 9 and query has 6 tokens",
        ),
        (
            {"actual_seq_lengths_kv": [5, 21]},
            "actual_seq_lengths_kv of request 1 is 21 and key has 20 tokens",
        ),
        ({"atten_mask": torch.zeros(3, 3), "sparse_mode": 1}, "atten_mask is Float (DT_FLOAT)"),
        (
            {"atten_mask": torch.zeros(5, 20).bool()},
            "atten_mask of shape [5, 20] is smaller than 6 queries x 20 keys",
        ),
        (
            {"atten_mask": torch.zeros(2, 1, 6, 19).bool(), "sparse_mode": 1},
            "atten_mask of shape [2, 1, 6, 19] is smaller",
        ),
        (
            {"pse_shift": torch.zeros(1, HEADS, 6, 19).half()},
            "pse_shift has shape [1, 4, 6, 19]; it must be [1 or 2, 4, 6, 20]",
        ),
        ({"num_key_value_heads": 1}, "key has shape [2, 2, 20, "),
        ({"query_padding_size": None, "inner_precise": 5}, "inner_precise is 5"),
        (
            {
                "key_antiquant_scale": torch.ones(1).half(),
                "value_antiquant_scale": torch.ones(1).half(),
            },
            "it must be int8",
        ),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 128},
            "a paged cache needs actual_seq_lengths_kv",
        ),
    ],
)
def test_arguments_outside_the_documentation_are_refused(options, message):
    given = {
        "num_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "input_layout": "BNSD",
        "scale": 0.2,
    } | options
    given = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_npu.npu_fused_infer_attention_score(*(x.npu() for x in inputs()), **given)
    assert torch.ones(1).npu().item() == 1  # it was refused at the call


def test_int8_queries_are_not_emulated():
    """A documented mode, of which the emulator must not say that CANN refuses it; without its scales
    CANN refuses."""
    q, k = (torch.ones(1, 8, size, 128, dtype=torch.int8, device="npu") for size in (164, 1024))
    scale = torch.full((1,), 0.01, device="npu")
    scales = dict.fromkeys(("dequant_scale1", "quant_scale1", "dequant_scale2"), scale)
    options = {"num_heads": 8, "input_layout": "BNSD", "quant_scale2": scale}
    message = r"an int8 query \(dequant_scale1, quant_scale1, dequant_scale2\) is not emulated$"
    with pytest.raises(RuntimeError, match=f"(?m){message}"):
        torch_npu.npu_fused_infer_attention_score(q, k, k, **options, **scales)
    with pytest.raises(RuntimeError, match=r"dequant_scale1.*\(rule fused_infer.int8-query, docum"):
        torch_npu.npu_fused_infer_attention_score(q, k, k, **options)
