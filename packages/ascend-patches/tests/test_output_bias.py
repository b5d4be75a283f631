# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Logits of Phi-3.5-MoE and Moondream 3 are those of torch with the bias of the output layer: not
in vLLM, but with the patches."""

import pytest
from harness.engines import scripts

SCRIPT = """
import sys
from ascend_patches import enter
enter("worker")
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.{module} import {name}
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    initialize_model_parallel()
    model = {name}.__new__({name})
    nn.Module.__init__(model)
    model.lm_head, model.logits_processor = ParallelLMHead(64, 16, bias=True), LogitsProcessor(64)
    model._answer_id = 7  # Which Moondream 3 never generates.
    draw = torch.Generator().manual_seed(0)
    for each in (model.lm_head.weight, model.lm_head.bias):
        each.data.copy_(torch.randn(each.shape, generator=draw))
    hidden = torch.randn(3, 16, generator=draw)
    logits = model.compute_logits(hidden)
    right = nn.functional.linear(hidden, model.lm_head.weight, model.lm_head.bias)
    finite = logits.isfinite()
    print(len(finite[0].nonzero()), bool(torch.allclose(logits[finite], right[finite], atol=1e-5)))
"""


@pytest.mark.parametrize(
    ("module", "name", "tokens"),
    [("phimoe", "PhiMoEForCausalLM", 64), ("moondream3", "Moondream3ForCausalLM", 63)],
)
@pytest.mark.parametrize("is_patched", [True, False])
def test_bias_of_the_output_layer_is_added(module, name, tokens, is_patched, monkeypatch):
    disabled = "" if is_patched else f"{module}.compute_logits"
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    script = SCRIPT.format(module=module, name=name)
    done = scripts.run(script)
    assert done.stdout.splitlines()[-1:] == [f"{tokens} {is_patched}"], done.stdout + done.stderr
