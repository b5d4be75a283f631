# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_moe.py: a step by mc2 on two NPUs of an Atlas A3, with different numbers of tokens.

Prints `RESULT {"name": "mc2", "errors": [<of rank 0>, <of rank 1>]}`, the largest differences from
the results in float64.
"""

import json

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ascend_communicator.moe import MoEShape, mc2
from ascend_platform import extension
from harness.engines import launcher
from ranks import FACTORS, RANKS, SIZES, FactorExperts, data

WIDTH = 1024


def play(rank: int, port: int) -> float:
    torch.npu.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    chip = extension.Chip(torch.npu.get_device_name(), 0, 0, 0)
    limits = mc2.algorithm(chip, MoEShape(RANKS, len(FACTORS), 2, WIDTH, torch.bfloat16), True)
    group = mc2.MC2Group(dist.group.WORLD, {"hccl_buffer_size": 16})
    x, weights = data(rank, SIZES[rank], WIDTH).bfloat16(), data(rank, SIZES[rank], 2, salt=1)
    ids = torch.stack([torch.randperm(len(FACTORS))[:2] for _ in x]).int()
    experts = FactorExperts(rank)
    given = x.npu(), weights.npu(), ids.npu(), len(FACTORS), experts, max(SIZES)
    output = mc2.dispatch_and_combine(limits, group, *given).cpu().double()
    exact = x.double() * (weights.double() * FACTORS.double()[ids.long()]).sum(1, keepdim=True)
    return float(((output - exact) / exact.abs().clamp(min=1)).abs().max())


def main() -> None:
    errors = launcher.run_ranks("ranks_of_a3.py", RANKS, play)
    print(f"RESULT {json.dumps({'name': 'mc2', 'errors': errors})}")


if __name__ == "__main__":
    main()
