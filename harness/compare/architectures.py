# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Architectures of vLLM's registry on an emulated NPU, with text, images and sounds, compared with
transformers: `tools/check architectures`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from harness import checkout
from harness.engines import npus
from harness.models import registry
from harness.progress import progress

PROGRAM = checkout.PROGRAMS / "serve_architectures.py"
KEPT = checkout.TOOLS / "generated_docs" / "models.json"
REASONS = KEPT.with_name("architectures.toml")


def unmeasured(known: set[str]) -> dict[str, dict[str, str]]:
    """The other architectures of vLLM's registry: refused by the platform, or not measured, with
    the cause."""
    from ascend_platform.config.architectures import refusal
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    causes = tomllib.loads(REASONS.read_text())["not measured"]
    cause_of = {}
    for name, cause in registry.not_built().items():
        line = refusal(name)
        if name in known:
            continue
        cause_of[name] = {"result": "refused", "message": f"RefusedError: {line}"}
        if not line:
            cause_of[name] = {"result": "not measured", "message": cause or causes[name]}
        if name in _MULTIMODAL_MODELS:
            cause_of[name]["inputs"] = ""
    return cause_of


def main() -> None:
    """See tools/check architectures."""
    parser = argparse.ArgumentParser(prog="tools/check architectures", description=__doc__)
    parser.add_argument(
        "architectures", nargs="*", help="such as LlamaForCausalLM (default: all without a result)"
    )
    parser.add_argument("--again", action="store_true", help="all, also those that have a result")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--results", type=Path, default=KEPT, help="the file of results")
    options = parser.parse_args()
    import_path = npus.path()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    every = registry.families()
    if unknown := sorted(set(options.architectures) - set(every)):
        parser.error(f"transformers or vLLM has no {', '.join(unknown)}")
    asked = options.architectures or [name for name in every if options.again or name not in known]
    kinds = {name: every[name] for name in asked}
    emulated = [
        sys.executable,
        "-m",
        "ascend_emulator.cli",
        "run",
        "--npus",
        "1",
        "--memory",
        "2GiB",
        "--",
    ]
    command = [*emulated, sys.executable, str(PROGRAM), json.dumps(kinds), str(options.timeout)]
    environ = os.environ | {
        "PYTHONPATH": import_path,
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    with (
        subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        progress("architectures:", len(asked)) as steps,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            for cause in npus.results(line):
                steps.advance(cause["architecture"])
                known[cause.pop("architecture")] = cause
                options.results.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
                print(cause, flush=True)
    known = {name: cause for name, cause in known.items() if cause["result"] != "not measured"}
    known |= unmeasured(set(known))
    options.results.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    explained = tomllib.loads(REASONS.read_text())["differs"]
    wrong = [
        name
        for name in asked
        if name in known and known[name]["result"] == "wrong" and name not in explained
    ]
    sys.exit(process.returncode or ", ".join(wrong) or 0)
