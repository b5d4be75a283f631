# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run: --npus 2
# refused: ranks 0 and 1 .* are both on NPU 0; .*torch\.npu\.set_device
# source: HCCL, one rank per device
# seen on hardware: no
"""Two processes of a group that both leave out ``torch.npu.set_device``: both compute on NPU 0."""

import os
import subprocess
import sys
import tempfile

if "RANK" not in os.environ:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, f"file://{directory}/store"]
        children = [
            subprocess.Popen(command, env=os.environ | {"RANK": str(rank)}) for rank in range(2)
        ]
        sys.exit(max(abs(child.wait()) for child in children))

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

dist.init_process_group("hccl", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
x = torch.ones(4, device="npu")
dist.all_reduce(x)
print(x)
dist.destroy_process_group()
