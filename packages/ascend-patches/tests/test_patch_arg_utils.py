# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``--enable-eplb`` on the NPU: refused by vLLM, accepted with the patch, which changes only that
check."""

import json
from pathlib import Path

import pytest
from harness.engines import scripts

NAME = "arg_utils.eplb_on_any_device"
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
# In a process of its own, since a patch is for a process: says "right" when the behaviour is as it
# should be.
SCRIPT = """
import sys
from ascend_patches import enter
enter("platform")
from vllm.config import parallel
from vllm.engine.arg_utils import EngineArgs
before = parallel.current_platform
hook = type(before).check_and_update_config.__func__
def ask(cls, config):
    global elsewhere
    elsewhere = parallel.current_platform.is_cuda_alike()
    hook(cls, config)
type(before).check_and_update_config = classmethod(ask)
try:
    config = EngineArgs(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2, enable_expert_parallel=True,
                        enable_eplb=True, distributed_executor_backend="external_launcher").create_engine_config()
    said = "left out" if not config.parallel_config.enable_eplb else "CUDA-alike elsewhere" if elsewhere else "right"
except ValueError as error:
    said = "refused" if "only supported on CUDA devices" in str(error) else str(error)
sys.exit(said if parallel.current_platform is before else "another platform has stayed")
"""


@pytest.mark.parametrize(
    ("disabled", "message"), [("", "right"), (NAME, "refused")], ids=["patched", "without"]
)
def test_eplb_on_any_device(
    disabled: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    tmp_path.joinpath("config.json").write_text(json.dumps(EXPERTS))
    done = scripts.run(SCRIPT, str(tmp_path))
    assert message in done.stderr.splitlines(), done.stdout + done.stderr
