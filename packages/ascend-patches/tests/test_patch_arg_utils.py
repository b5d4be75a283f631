"""What EngineArgs.create_engine_config refuses of expert load balancing, and that the patch lets it in."""

import subprocess
import sys

import environment
import pytest

NAME = "arg_utils.eplb_on_any_device"
# In a process of its own, since a patch is for a process: prints "right" when the behaviour is as it should be.
SCRIPT = """
import sys
from ascend_patches import enter
enter("platform")
from vllm.engine.arg_utils import EngineArgs
try:
    config = EngineArgs(sys.argv[1], tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True,
                        distributed_executor_backend="external_launcher", max_model_len=64).create_engine_config()
except ValueError as error:
    print("only supported on CUDA devices" in str(error) and "refused")
else:
    print("right" if config.parallel_config.enable_eplb else "without")
"""


@pytest.mark.parametrize(("disabled", "said"), [("", "right"), (NAME, "refused")], ids=["patched", "without"])
def test_eplb_on_any_device(disabled: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    adder = environment.ROOT / "tools" / "models" / "adder"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(adder)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [said], done.stdout + done.stderr  # vLLM logs on stdout
