# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_startup.py: the state of an engine core that serves in a process of its own, and its
end with its parent.

    python harness/programs/start_engine.py MODEL

Prints `RESULT {json}`.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `state`

import psutil


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file, log = Path(directory, "state"), Path(directory, "log")
        # No pipe, because an engine that outlives its parent would keep it open.
        with log.open("w") as output:
            subprocess.run(
                [sys.executable, __file__, model, str(file)],
                stdout=output,
                stderr=output,
                check=False,
            )
        state_found: dict[str, Any] = (
            json.loads(file.read_text()) if file.exists() else {"log": log.read_text()[-2000:]}
        )
    if "pid" in state_found:
        state_found["ended"] = _ends(state_found["pid"])
    print("RESULT", json.dumps(state_found), flush=True)


def _ends(pid: int) -> bool:
    """Whether a process ends within 20 seconds; kill it if it does not."""
    try:
        process = psutil.Process(pid)
        process.wait(20)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        process.kill()
        return False
    return True


def serve(model: str, file: Path) -> None:
    """Start an engine, write its state and die by SIGKILL."""
    import harness.engines.imports  # noqa: F401
    from vllm import LLM

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
    )
    (worker_state,) = engine.collective_rpc(state)
    file.write_text(json.dumps(worker_state | {"parent": os.getpid()}))
    os.kill(os.getpid(), signal.SIGKILL)


def state(worker: Any) -> dict[str, Any]:
    threads = [thread.name for thread in threading.enumerate()]
    return {
        "pid": os.getpid(),
        "thresholds": gc.get_threshold(),
        "frozen": gc.get_freeze_count(),
        "threads": threads,
    }


if __name__ == "__main__":
    if sys.argv[2:]:
        serve(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1])
