# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Experts without a gate: refused by vLLM on a platform that it does not name, made with
the patch."""

import pytest
from harness.engines import scripts

NAME = "config.post_init"
SCRIPT = """
from ascend_patches import enter
enter("worker")
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
parallel = FusedMoEParallelConfig.make_no_parallel()
try:
    made = FusedMoEConfig(
        4, 2, 64, 32, 4, 4, MoEActivation.RELU2_NO_MUL, "cpu", RoutingMethodType.DeepSeekV3, parallel, torch.bfloat16
    )
    print(made.w13_num_shards)
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("disabled", "printed"), [("", "1"), (NAME, "is_act_and_mul=False is supported only for CUDA")]
)
def test_experts_without_a_gate_are_made_with_the_patch(disabled, printed, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    assert done.stdout.splitlines()[-1].startswith(printed), done.stdout + done.stderr
