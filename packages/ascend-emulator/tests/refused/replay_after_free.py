# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run:
# refused: aclnnMuls \(node 0 of graph 0\): self, 33554432 bytes at 0x[0-9a-f]+, which were freed after the call
# source: PyTorch, memory pools of graphs
# seen on hardware: no
"""Replays a graph after the memory of its input was freed."""

import torch
import torch_npu  # noqa: F401

x = torch.ones(8 << 20, device="npu")
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.graph(graph):
    y = x * 2
del x
torch.npu.empty_cache()
graph.replay()
torch.npu.synchronize()
