# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs for test_mc2.py: matmuls that communicate."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from hccl_ranks import data, plain, scenario


def name_of(rank: int) -> str:
    """The name of the default group's communicator."""
    group = dist.distributed_c10d._get_default_group()
    return str(group._get_backend(torch.device("npu")).get_hccl_comm_name(rank))


def matmuls(rank: int, ranks: int) -> Any:
    hcom, out = name_of(rank), {}
    for dtype in (torch.float16, torch.bfloat16):
        x1, x2 = (
            (data(rank, (8, 256), dtype) / 16).npu(),
            data(rank, (256, 48), dtype, salt=1).npu(),
        )
        bias, x3 = data(rank, (48,), dtype, salt=2).npu(), data(rank, (8, 48), dtype, salt=3).npu()
        reduce = torch_npu.npu_mm_all_reduce_base
        answers = [
            reduce(x1, x2, hcom),
            reduce(x1, x2, hcom, bias=bias, x3=x3),
            reduce(x1, x2, hcom, bias=bias, comm_mode="aiv"),
        ]
        answers.append(reduce(x1.view(2, 4, 256), x2, hcom).view(8, 48))
        for turned in (False, True):
            other = x2.t().contiguous().t() if turned else x2
            answers += torch_npu.npu_all_gather_base_mm(
                x1, other, hcom, ranks, gather_output=not turned
            )
            answers.append(torch_npu.npu_mm_reduce_scatter_base(x1, other, hcom, ranks))
        answers += torch_npu.npu_all_gather_base_mm(x1, x2, hcom, ranks, comm_mode="aiv")
        answers.append(torch_npu.npu_mm_reduce_scatter_base(x1, x2, hcom, ranks, comm_mode="aiv"))
        # int8 weights
        weight = data(rank, (256, 48), torch.int8, salt=4).npu()
        scale, offset = (
            data(rank, (48,), dtype, salt=5).npu() / 8,
            data(rank, (48,), dtype, salt=6).npu(),
        )
        grouped = data(rank, (4, 48), dtype, salt=7).npu() / 8
        answers.append(
            reduce(x1, weight, hcom, antiquant_scale=scale, antiquant_offset=offset, x3=x3)
        )
        answers.append(
            reduce(
                x1, weight, hcom, antiquant_scale=grouped, antiquant_group_size=64, comm_mode="aiv"
            )
        )
        out[str(dtype)] = plain(answers)
    x1, x2 = data(rank, (8, 256), torch.int8).npu(), data(rank, (256, 48), torch.int8, salt=1).npu()
    bias = data(rank, (48,), torch.int32, salt=2).npu()
    column, row = (
        data(rank, (48,), torch.float32, salt=3).abs() / 64,
        data(rank, (8,), torch.float32, salt=4).abs().npu(),
    )
    packed = torch_npu.npu_trans_quant_param(column.npu())
    half = column.to(torch.bfloat16).npu()
    pair = {"x1_scale": row.view(8, 1), "x2_scale": column.npu().view(1, 48), "comm_mode": "aiv"}
    out["int8"] = plain(
        [
            torch_npu.npu_mm_all_reduce_base(x1, x2, hcom, bias=bias, dequant_scale=packed),
            torch_npu.npu_mm_all_reduce_base(x1, x2, hcom, dequant_scale=half, pertoken_scale=row),
            torch_npu.npu_mm_all_reduce_base(
                x1, x2, hcom, dequant_scale=half, pertoken_scale=row, comm_mode="aiv"
            ),
            *torch_npu.npu_all_gather_base_mm(x1, x2, hcom, ranks, **pair),
            torch_npu.npu_mm_reduce_scatter_base(
                x1, x2, hcom, ranks, output_dtype=torch.float16, **pair
            ),
        ]
    )
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(0.5)
    out["arrived"] = time.monotonic()  # The same clock in all ranks.
    torch_npu._npu_distribute_barrier(x_ref=row, group=hcom, world_size=ranks)
    torch.npu.synchronize()
    out["left"] = time.monotonic()
    return out


scenario("matmuls 2", ranks=2)(matmuls)
scenario("matmuls 4", ranks=4)(matmuls)


@scenario("all to all", ranks=2, soc="Ascend910_93")
def all_to_all(rank: int, ranks: int) -> Any:
    hcom, out = name_of(rank), []
    for dtype, bias_dtype in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        x, first = data(rank, (6, 16), dtype).npu(), data(rank, (32, 10), dtype, salt=1).npu()
        last, bias = (
            data(rank, (16, 10), dtype, salt=2).npu(),
            data(rank, (10,), bias_dtype, salt=3).npu(),
        )
        answers = [
            *torch_npu.npu_all_to_all_matmul(
                x, first, hcom, ranks, bias=bias, all2all_axes=[-2, -1]
            ),
            torch_npu.npu_all_to_all_matmul(
                x, first.t().contiguous().t(), hcom, ranks, comm_mode="aiv"
            )[0],
            torch_npu.npu_matmul_all_to_all(x, last, hcom, ranks, bias=bias, all2all_axes=[-1, -2]),
            torch_npu.npu_matmul_all_to_all(x, last, hcom, ranks, comm_mode="aiv"),
        ]
        out.append(plain(answers))
    return out


def grouped_counts(ranks: int, experts: int) -> torch.Tensor:
    """How many tokens each rank sends to each expert of each rank, [from][to][expert]: 1024 from
    each, and to each."""
    cuts = (
        torch.randint(0, 1025, (ranks * experts - 2,), generator=torch.Generator().manual_seed(5))
        .sort()
        .values
    )
    # The first expert gets none of the rank's own tokens.
    ends = torch.cat([cuts.new_zeros(2), cuts, cuts.new_full((1,), 1024)])
    return torch.stack([ends.diff().view(ranks, experts).roll(rank, 0) for rank in range(ranks)])


@scenario("grouped", ranks=8, soc="Ascend910_93")
def grouped(rank: int, ranks: int) -> Any:
    """To the experts and, with the same counts, back."""
    counts = grouped_counts(ranks, 2)
    sent, received = counts[rank].flatten().tolist(), counts[:, rank].flatten().tolist()
    x = (data(rank, (1024, 1024), torch.float16) / 32).npu()
    weight = data(rank, (2, 1024, 4), torch.float16, salt=1).npu()
    mm = {
        "mm_x": data(rank, (3, 16), torch.float16, salt=2).npu(),
        "mm_weight": data(rank, (16, 5), torch.float16, salt=3).npu(),
    }
    there = torch_npu.npu_alltoallv_gmm(
        x, weight, name_of(rank), ranks, sent, received, permute_out_flag=True, **mm
    )
    turned = {"trans_gmm_weight": True, "comm_mode": "aiv"}
    flipped = weight.transpose(1, 2).contiguous()
    again = torch_npu.npu_alltoallv_gmm(x, flipped, name_of(rank), ranks, sent, received, **turned)
    out = [there[0], there[1], there[2][:, 0], again[0]]
    x, weight = (
        data(rank, (1024, 8), torch.float16, salt=4).npu(),
        data(rank, (2, 8, 1024), torch.float16, salt=5).npu(),
    )
    back = torch_npu.npu_gmm_alltoallv(x, weight, name_of(rank), ranks, received, sent, **mm)
    flipped = weight.transpose(1, 2).contiguous()
    again = torch_npu.npu_gmm_alltoallv(x, flipped, name_of(rank), ranks, received, sent, **turned)[
        0
    ]
    return plain([*out, back[0][:, :3], back[1], again[:, :3]])
