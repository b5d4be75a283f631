# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run: --npus 1
# refused: HcclAllReduce\(4194304 float32, sum\).*sendBuf, 16777216 bytes at 0x[0-9a-f]+, which were freed after the call
# source: PyTorch, memory pools of graphs
# seen on hardware: no
"""Replays a graph with a collective after the memory that it reduces was freed."""

import os

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
torch.npu.set_device(0)
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4 << 20, device="npu")
dist.all_reduce(x)
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.graph(graph):
    dist.all_reduce(x)
graph.replay()
torch.npu.synchronize()
del x
torch.npu.empty_cache()
graph.replay()
torch.npu.synchronize()
