# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A third-party plugin's patches in a real engine: each is applied in its process, the engine
core's before its creation."""

import os
import subprocess
import sys
from pathlib import Path

from ascend_platform import extension
from harness import checkout
from harness.project.distributions import write_metadata

ADDER = checkout.ADDER
PATCHES = """
import multiprocessing, os


def traced(function):
    def make(original):
        def replacement(*args, **kwargs):
            with open(os.environ["TRACE"], "a") as trace:
                print(function, multiprocessing.current_process().name, file=trace)
            return original(*args, **kwargs)
        return replacement
    return make


"""
ROW = """
[[override]]
target = "{target}"
by = "patch_traces:{function}"
scope = "{scope}"
sources = {{ "0.31" = "{known}" }}
"""
TARGETS = {
    "arguments": ("vllm.engine.arg_utils:EngineArgs.create_model_config", "platform"),
    "start": ("vllm.v1.engine.core:EngineCoreProc.run_engine_core", "engine"),
    "init": ("vllm.v1.engine.core:EngineCoreProc.__init__", "engine"),
    "handshake": ("vllm.v1.engine.core:EngineCoreProc._perform_handshakes", "engine"),
    "busy": ("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", "engine"),
    "renamed": ("vllm.v1.engine.core:EngineCoreProc.run_loop", "engine"),
    "worker": ("vllm.v1.worker.gpu_worker:Worker.__init__", "worker"),
}
SCRIPT = """
import sys
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=256, gpu_memory_utilization=0.3,
                 additional_config={"ascend": {"patches": {"disable": ["traces.handshake"]}}})
    asked = [{"prompt_token_ids": tokenizer("12+34=").input_ids}]
    served = engine.generate(asked, SamplingParams(temperature=0, max_tokens=4, detokenize=False), use_tqdm=False)
    print("ANSWER", tokenizer.decode(served[0].outputs[0].token_ids))
"""


def test_each_scope_is_patched_in_its_process(tmp_path: Path) -> None:
    package = tmp_path / "plugin_of_somebody"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    rows, lines = "optional = true\n", []
    for function, (target, scope) in TARGETS.items():
        module, _, qualname = target.partition(":")
        source = extension.module_source(module) or ""
        known = (
            "0" * 12 if function in ("busy", "renamed") else extension.fingerprint(source, qualname)
        )
        rows += ROW.format(target=target, function=function, scope=scope, known=known)
        lines.append(f"{function} = traced({function!r})")
    package.joinpath("overrides.toml").write_text(rows)
    package.joinpath("patch_traces.py").write_text(PATCHES + "\n".join(lines) + "\n")
    points = "[vllm_ascend.overrides]\nsomebody = plugin_of_somebody\n"
    write_metadata(tmp_path, "plugin-of-somebody", entry_points=points)
    script, trace = tmp_path / "serve.py", tmp_path / "trace"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING")
    }
    done = subprocess.run(
        [sys.executable, str(script), str(ADDER)],
        env=variables | {"PYTHONPATH": path, "TRACE": str(trace)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = done.stdout + done.stderr
    assert "ANSWER 46;" in done.stdout, log[-5000:]
    assert trace.read_text().splitlines() == [
        "arguments MainProcess",
        "start EngineCore",
        "init EngineCore",
        "worker EngineCore",  # A single worker runs in the engine core's process.
    ]
    assert (
        "patch traces.busy disabled: target vllm.v1.engine.core:EngineCoreProc.run_busy_loop has"
        " changed" in log
    )
    assert "expected 000000000000" in log
    assert (
        "patch traces.renamed disabled: target vllm.v1.engine.core:EngineCoreProc.run_loop is"
        " missing" in log
    )
    assert "Unknown vLLM environment variable" not in log
