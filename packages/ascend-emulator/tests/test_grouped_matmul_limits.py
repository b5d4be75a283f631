# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Arguments that grouped matmuls refuse, with the message."""

import pytest
import torch
import torch_npu
from comparisons import int4


def grouped(x, weight, **more):
    """One group of rows, or one for each end in `group_list`."""
    options = {"group_list": torch.tensor([4]).npu(), "split_item": 3, "group_type": 0} | more
    stack = weight[None].repeat(len(options["group_list"]), 1, 1)
    return torch_npu.npu_grouped_matmul([x], [stack], **options)


def stacked(x, weight, **more):
    """Two groups of rows."""
    return grouped(x, weight, group_list=torch.tensor([1, 4]).npu(), **more)


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "smooth scale": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [b[None]],
                [torch.ones(1, 8).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
                smooth_scale=torch.ones(1).npu(),
            ),
            r"smooth_scale is given and x is Char \(DT_INT8\); it belongs to an x of packed int4",
        ),
        "dequant mode": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [b[None]],
                [torch.ones(1, 8).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
                dequant_mode=1,
            ),
            "dequant_mode is 1; allowed: 0",
        ),
        "columns": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [torch.ones(1, 8, 10272, dtype=torch.int8).npu()],
                [torch.ones(1, 10272).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
            ),
            "weight has 10272 columns; allowed: up to 10240",
        ),
        "rows": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b[:5], b[0, :8].float(), output_dtype=torch.bfloat16
            ),
            "x1 has 8 columns and x2 5 rows",
        ),
        "scale": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b, b[0, :3].bfloat16(), output_dtype=torch.bfloat16
            ),
            "scale has shape",
        ),
        "lists": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()],
                [b.half()] * 3,
                group_list=torch.tensor([1, 4]).npu(),
                split_item=3,
                group_type=0,
            ),
            "group_list has 2 groups and weight 3",
        ),
        "columns of x": (
            lambda a, b: torch_npu.npu_grouped_matmul([a.half()], [b[:5].half()], group_type=-1),
            "x has 8 columns and weight 0 5 rows",
        ),
        "bias": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()], [b.half()], bias=[b[0, :3].half()], group_type=-1
            ),
            r"bias has shape \[3\]; its last dimension must be that of weight 0, 8",
        ),
        "bias of a stack": (
            lambda a, b: stacked(a.half(), b.half(), bias=[b[:1].half()]),
            r"bias has shape \[1, 8\]; its first dimension must be that of weight, 2",
        ),
        "scale of a stack": (
            lambda a, b: stacked(a, b, scale=[b[0].float()], output_dtype=torch.float16),
            r"scale has shape \[8\]; its first dimension must be that of weight, 2",
        ),
        "scales of rows": (
            lambda a, b: stacked(
                a,
                b,
                scale=[b[:2].float()],
                per_token_scale=[a[:3, 0].float()],
                output_dtype=torch.float16,
            ),
            r"per_token_scale has shape \[3\] and x \[4, 8\]; one scale per row is needed",
        ),
        "several x and a stack": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()] * 2, [b[None].half()], split_item=3, group_type=0
            ),
            "x has 2 tensors and weight 1",
        ),
        "dtype": (
            lambda a, b: torch_npu.npu_grouped_matmul([a.half()], [b.float()], group_type=-1),
            r"weight is Float \(DT_FLOAT\) and x is? Half \(DT_FLOAT16\)",
        ),
        "dtype of a bias": (
            lambda a, b: grouped(a.bfloat16(), b.bfloat16(), bias=[b[0].bfloat16()]),
            r"bias is BFloat16 \(DT_BFLOAT16\); allowed: Float",
        ),
        "dtype of scales": (
            lambda a, b: grouped(a, b, scale=[b[0].float()], output_dtype=torch.bfloat16),
            r"scale is Float \(DT_FLOAT\); allowed: BFloat16",
        ),
        "dtype of scales of tokens": (
            lambda a, b: grouped(
                a,
                b,
                scale=[b[0].float()],
                per_token_scale=[a[:, 0].half()],
                output_dtype=torch.float16,
            ),
            r"per_token_scale is Half \(DT_FLOAT16\); allowed: Float",
        ),
        "dtype of dequantization": (
            lambda a, b: grouped(
                a.half(), b, antiquant_scale=[b[:1].bfloat16()], antiquant_offset=[b[:1].bfloat16()]
            ),
            r"antiquant_scale is BFloat16 \(DT_BFLOAT16\); allowed: Half",
        ),
        "inner dimension of x": (
            lambda a, b: grouped(a.half().repeat(1, 8192), b.half().repeat(8192, 1)),
            r"x has shape \[4, 65536\], a last dimension of 65536; allowed: below 65536",
        ),
        "inner dimension of the weight": (
            lambda a, b: grouped(a.half(), b.half().repeat(1, 8192)),
            "a last dimension of 65536; allowed: below 65536",
        ),
        "pairs": (
            lambda a, b: grouped(
                a.half(), b.half(), group_list=torch.tensor([[0, 4]]).npu(), group_list_type=2
            ),
            r"x is Half \(DT_FLOAT16\); allowed: Char",
        ),
        "split": (
            lambda a, b: grouped(a.half(), b.half(), split_item=0),
            "split_item is 0; allowed: 2, 3",
        ),
        "wide quantized weight": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b.repeat(1, 8192), torch.ones(65536).npu(), output_dtype=torch.bfloat16
            ),
            "the last dimension of x2 is 65536; allowed: 1 to 65535",
        ),
    }.values(),
)
def test_limits_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(
            torch.ones(4, 8, dtype=torch.int8, device="npu"),
            torch.ones(8, 8, dtype=torch.int8, device="npu"),
        )
    assert torch.ones(1).npu().item() == 1  # it was refused at the call


def test_int4_rows_of_the_plain_operator_are_not_emulated():
    """A documented mode, of which the emulator must not say that CANN refuses it."""
    (_, x), (_, weight) = int4(6, 32), int4(1, 32, 32)
    scale = torch.ones(1, 1, 32, dtype=torch.int64, device="npu")
    with pytest.raises(RuntimeError, match="x of int4, eight of which are an int32, is not emul"):
        torch_npu.npu_grouped_matmul(
            [x.npu()],
            [weight.npu()],
            scale=[scale],
            per_token_scale=[torch.ones(6, device="npu")],
            group_list=torch.tensor([6]).npu(),
            group_list_type=0,
            group_type=0,
            split_item=3,
            output_dtype=torch.float16,
        )
