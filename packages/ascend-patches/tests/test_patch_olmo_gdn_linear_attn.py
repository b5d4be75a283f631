# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""OLMo-hybrid's convolution is loaded in three parts, whose number is the tensor's attribute: not
by vLLM, but with the patch."""

import pytest
from harness.engines import scripts

NAME = "olmo_gdn_linear_attn.make_fused_conv1d_weight_loader"
SCRIPT = """
from ascend_patches import enter
enter("worker")
import torch
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import _make_fused_conv1d_weight_loader
whole, rank = torch.zeros(8, 1, 4), 1
load = _make_fused_conv1d_weight_loader([4, 4, 8], 2, rank)
try:
    for part, size in enumerate((4, 4, 8)):
        weight = torch.arange(size).view(size, 1, 1).expand(size, 1, 4) + 10.0 * part
        weight.shard_id = part
        load(whole, weight)
    print(whole[:, 0, 0].tolist())
except TypeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("disabled", "printed"),
    [
        ("", "[2.0, 3.0, 12.0, 13.0, 24.0, 25.0, 26.0, 27.0]"),
        (NAME, "list indices must be integers"),
    ],
)
def test_the_parts_of_a_convolution_are_loaded_with_the_patch(disabled, printed, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    assert done.stdout.splitlines()[-1].startswith(printed), done.stdout + done.stderr
