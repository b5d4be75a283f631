# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shared experts on a stream of their own: results and memory in a captured graph."""

from types import SimpleNamespace

import torch
from ascend_platform.ops.shared_experts import NPUSharedExperts
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

GRAPHS = 8  # Whether the pool is wrong depends on the progress of torch_npu's task queue.


def test_tensors_of_a_captured_step_are_in_the_graph_pool() -> None:
    """torch_npu's allocator takes the pool of a stream that is captured already, and its task queue
    runs behind."""
    config = VllmConfig(additional_config={"ascend": {"platform": {"shared_experts_stream": True}}})
    layer = torch.nn.Linear(64, 64, bias=False).npu()
    with set_current_vllm_config(config):
        parallel = FusedMoEParallelConfig.make_no_parallel()
        shared = NPUSharedExperts(
            layer, SimpleNamespace(moe_parallel_config=parallel), False, lambda: False
        )
    x = torch.randn(4, 64).npu()
    for _ in range(GRAPHS):
        graph = torch.npu.NPUGraph()
        with torch.no_grad(), torch.npu.graph(graph):
            inputs = x
            for _ in range(30):
                inputs = inputs + x
            assert shared.maybe_forward_async(inputs)
            shared.wait()
            output = shared.output
            total = output + inputs
        (pool,) = {
            segment["segment_pool_id"]
            for segment in torch.npu.memory_snapshot()
            if holds(segment, total)
        }
        assert {
            segment["segment_pool_id"]
            for segment in torch.npu.memory_snapshot()
            if holds(segment, output)
        } == {pool}
        x.copy_(torch.randn(4, 64))
        graph.replay()
        expected = 31 * x.cpu().double()
        expected = expected + expected @ layer.weight.detach().cpu().double().T
        torch.testing.assert_close(total.cpu().double(), expected, rtol=1e-4, atol=1e-3)


def holds(segment: dict[str, int], tensor: torch.Tensor) -> bool:
    return segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
