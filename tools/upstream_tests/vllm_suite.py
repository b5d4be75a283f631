# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run vLLM's own tests on the platform, and compare the outcome with the allow-list vllm.toml (see
tools/upstream).

Those of the V2 model runner run on vLLM 0.33, in an environment of tools/compat, whose Python runs
this module as a program: `python -m upstream_tests.vllm_suite TESTS SECONDS [FILE ...]`.
"""

from __future__ import annotations

import fnmatch
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import NoReturn

import environment

LIST = environment.ROOT / "tools" / "upstream_tests" / "vllm.toml"
REPORT = environment.ROOT / "docs" / "reports" / "vllm-tests.md"
HOME = environment.ROOT / ".upstream" / "vllm-run"
NEEDS = ["tblib", "pytest-asyncio"]  # of the tests' conftest.py and markers
# The public configurations of models that many tests make a VllmConfig of; no test here needs their
# weights.
MODELS = {
    "facebook/opt-125m": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "torch_dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen1.5-7B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    },
}
INSTALL = """
    from ascend_platform.overrides import guard
    from ascend_platform.config import runners
    # Some tests call what is in vLLM's modules without a worker of ours.
    guard.install("common", "graph.acl_graph", "worker.torch_npu_view")
    runners.module("v1", "runner").install()
"""
INSTALL_V2 = """
    import importlib, sys
    from ascend_platform.overrides import guard, table
    def named(name, within):
        return getattr(importlib.import_module(within or name.partition(":")[0]), name.rpartition(":")[2], None)
    targets = [(each.target, next(iter(each.replaced_in), "")) for each in table.rows("v2") if each.is_needed]
    before = {target: named(target, "") for target, _ in targets}
    guard.override("vllm.triton_utils.importing:HAS_TRITON", True)
    guard.install("common", "graph.acl_graph", "worker.torch_npu_view")
    guard.install("v2")
    replaced = {id(before[target]): named(target, within) for target, within in targets if callable(before[target])}
    for item in session.items:  # which have imported vLLM's
        for name, value in vars(item.module).items():
            if id(value) in replaced:
                setattr(item.module, name, replaced[id(value)])
"""
PLUGIN = """
import gc, json, os
def pytest_collection_finish(session):{install}
    gc.unfreeze = lambda: None  # vLLM's cleanup after each case would walk through all that is imported
    gc.freeze()
def keep(**fields):
    with open(os.environ["UPSTREAM_RESULTS"], "a") as file:
        print(json.dumps(fields), file=file)
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        keep(case=report.nodeid, outcome=report.outcome, message=(crash.message if crash else str(report.longrepr or ""))[:400])
def pytest_collectreport(report):
    if report.failed:
        keep(case=report.nodeid, outcome="failed", message=str(report.longrepr)[-400:])
"""


# The V2 runner's tests name CUDA as their device, and are skipped elsewhere; those of the list with
# `npu` run with these changes.
ON_NPU = (
    (r'pytest\.importorskip\("triton"\)', ""),
    (r"torch\.cuda\.", "torch.npu."),
    (r"""(["'])cuda(:0)?\1""", r"\1npu\2\1"),
    (r"current_platform\.is_cuda(_alike)?\(\)", "current_platform.is_out_of_tree()"),
)
V2_VLLM = "0.33"


def prepare(install: str = INSTALL) -> dict[str, str]:
    """Install additional requirements of the tests; returns the environment variables to run them
    with."""
    extra, models = HOME / "packages", HOME / "models"
    if not (extra / "tblib").exists():
        uv, settings = environment.find_uv()
        command = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--python",
            sys.executable,
            "--target",
            str(extra),
            *NEEDS,
        ]
        if subprocess.run(command, env=settings, check=False).returncode:
            sys.exit(
                f"upstream: cannot install {' and '.join(NEEDS)}; check the network and pip's"
                " settings"
            )
    for name, config in MODELS.items():
        model = models / "hub" / f"models--{name.replace('/', '--')}"
        (model / "snapshots" / "0").mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text("0")
        (model / "snapshots" / "0" / "config.json").write_text(json.dumps(config))
    (HOME / "upstream_plugin.py").write_text(PLUGIN.replace("{install}", install.rstrip()))
    variables = {
        "HF_HOME": str(models),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(extra), str(HOME)]),
    }
    return os.environ | variables | {"OMP_NUM_THREADS": "1"}


def warm_up(tests: Path, variables: dict[str, str]) -> None:
    """Import what all files import, once for all forks."""
    from ascend_platform.worker import worker  # noqa: F401

    sys.path[:0] = [str(tests.parent), *variables["PYTHONPATH"].split(os.pathsep)]
    for name in ("pytest", "tests.conftest"):
        importlib.import_module(name)
    gc.freeze()  # forks would copy it otherwise


def run(tests: Path, name: str, variables: dict[str, str], deadline: float) -> list[dict[str, str]]:
    """The outcomes of one file's cases, in a fork of a process that has imported vLLM; a deadline
    that passes is a failure."""
    with tempfile.TemporaryDirectory() as directory:
        kept, log = Path(directory, "results"), Path(directory, "log")
        kept.touch()
        child = os.fork()
        if not child:
            _work(tests, name, variables | {"UPSTREAM_RESULTS": str(kept)}, log)
        ended = time.monotonic() + deadline
        while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ended:
            time.sleep(0.05)
        if found == (0, 0):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = f"not done within {deadline:g} s"
        else:
            code = os.waitstatus_to_exitcode(found[1])
            status = (
                ""
                if code in (0, 1)
                else f"pytest ended with {code}: {log.read_text(errors='replace')[-300:]}"
            )
        cases = [json.loads(line) for line in kept.read_text().splitlines()]
    for case in cases:
        case["case"] = case["case"].partition(".py::")[2]
    return cases + ([{"case": "", "outcome": "failed", "message": status}] if status else [])


def _work(tests: Path, name: str, variables: dict[str, str], log: Path) -> NoReturn:
    status = 3
    try:
        os.setsid()
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(variables)
        os.chdir(tests.parent)
        sys.argv = ["pytest"]
        import pytest

        status = pytest.main(
            [
                "-q",
                "--no-header",
                "-p",
                "no:cacheprovider",
                "-p",
                "upstream_plugin",
                f"tests/{name}",
            ]
        )
    finally:
        os._exit(int(status))


def label_of(message: str, reasons: list[dict]) -> str:
    """The label of the reason whose pattern is in a failure's message, or ""."""
    return next(
        (each["label"] for each in reasons if fnmatch.fnmatchcase(message, f"*{each['message']}*")),
        "",
    )


def judged(entry: dict, found: list[dict[str, str]], reasons: list[dict]) -> list[str]:
    """Deviations from the allow-list, one line each."""
    wrong, fails = [], entry.get("fails", {})
    labels: Counter[str] = Counter()
    failed = [case for case in found if case["outcome"] == "failed"]
    for case in failed:
        if any(fnmatch.fnmatchcase(case["case"], pattern) for pattern in fails):
            continue
        if label := label_of(case["message"], reasons):
            labels[label] += 1
        else:
            wrong.append(
                f"{case['case'] or 'the file'} failed:"
                f" {case['message'].splitlines()[0] if case['message'] else ''}"
            )
    for pattern in fails:
        if not any(fnmatch.fnmatchcase(case["case"], pattern) for case in failed):
            wrong.append(
                f"{pattern} is expected to fail, and nothing of it did: take it off the list"
            )
    for label in {each["label"] for each in reasons}:
        if labels[label] != entry.get(label, 0):
            wrong.append(
                f"{labels[label]} cases failed for the reason '{label}'; the list says"
                f" {entry.get(label, 0)}"
            )
    passed = len({case["case"] for case in found if case["outcome"] == "passed"})
    if passed != entry["passes"]:
        wrong.append(f"{passed} cases passed; the list says {entry['passes']}")
    return wrong


def on_npu(tests: Path, names: list[str]) -> Path:
    """A copy of the tests in which these files name the NPU as their device."""
    copied = HOME / "v2" / "tests"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(tests, copied)
    shutil.copy(tests.parent / "pyproject.toml", copied.parent)
    for name in names:
        text = (copied / name).read_text()
        for pattern, replacement in ON_NPU:
            text = re.sub(pattern, replacement, text)
        (copied / name).write_text(text)
    return copied


def report(entries: list[dict], v2: list[dict], reasons: list[dict], version: str) -> str:
    """The page of the documentation."""
    total = sum(entry["passes"] for entry in entries)
    labels = list(dict.fromkeys(each["label"] for each in reasons))
    rows = [
        " | ".join(
            [
                f"| `{e['name']}`",
                *(str(e.get(key, "")) for key in ("passes", *labels)),
                f"{len(e['fails']) or ''} |",
            ]
        )
        for e in entries
    ]
    counts = ", ".join(f"{sum(e.get(label, 0) for e in entries)} {label}" for label in labels)
    messages = [f"- {each['label']}: `{each['message']}`: {each['why']}" for each in reasons]
    patterns = [
        f"- `{e['name']}`, `{pattern}`: {why}"
        for e in entries
        for pattern, why in e.get("fails", {}).items()
    ]
    rows_v2 = [f"| `{e['name']}` | {e['passes']} | {len(e['fails']) or ''} |" for e in v2]
    fails_v2 = [
        f"- `{e['name']}`, `{pattern}`: {why}" for e in v2 for pattern, why in e["fails"].items()
    ]
    return f"""# vLLM's own tests

`tools/upstream --suite vllm` runs {len(entries)} files of vLLM {version}'s tests with the platform installed, on emulated
NPUs, without a network and without a model's weights. {total} cases have to pass. Expected to fail, by the error's message:
{counts}; and {len(patterns)} patterns of cases. The list is `tools/upstream_tests/vllm.toml`; a case that fails and is not in
it, one that is in it and passes, and a number that is not the list's end the command with 1.

| file | have to pass | {" | ".join(labels)} | patterns |
|---|---|{"---|" * len(labels)}---|
{chr(10).join(rows)}

## Why

{chr(10).join(messages + patterns)}

## Of the V2 model runner

`tools/upstream --suite vllm --runner v2` runs {len(v2)} files of vLLM {V2_VLLM}'s tests of its [V2
runner](../v2-model-runner.md), in the environment of `tools/compat {V2_VLLM}`, with the overrides of that runner.
Where they name CUDA as their device, they run on an NPU. {sum(e["passes"] for e in v2)} cases have to pass.

| file | have to pass | patterns |
|---|---|---|
{chr(10).join(rows_v2)}

Expected to fail:

{chr(10).join(fails_v2)}

Not in the list, of `v1/worker`: the files of thinking budgets, trace replay and prompt embeddings, which are refused (23 cases);
of pooled slots (1), which expects -1 for padding; of Gumbel noise, most of whose cases need more memory than an emulated NPU has,
and of 64-bit offsets, which was not run for the same reason; of warm-up blocks (27) and quantized draft heads (8), which are
skipped without CUDA; and of EAGLE-3 with pipelines, which imports a model that needs CUDA.
`v1/worker/test_gpu_model_runner_prefill_tail_classification.py` tests the V1 runner, and is in the first list. On vLLM 0.33 its
process aborts: vLLM's fixture asks for NCCL on all devices but the CPU, and gets Gloo where PyTorch has no NCCL; the
[PyTorch 2.14](../compatibility.md) made here from the CUDA wheel says that it has. With HCCL in the fixture and
`VLLM_USE_V2_MODEL_RUNNER=0` both cases pass there.
"""


def listed(table: str) -> list[dict]:
    """The entries of the allow-list: `files`, or `v2`."""
    found = tomllib.loads(LIST.read_text())
    fails = found["fails_v2" if table == "v2" else "fails"]
    return [
        counts | {"name": name, "fails": fails.get(name, {})}
        for name, counts in found[table].items()
    ]


def main(tests: Path, patterns: list[str], deadline: float, table: str = "files") -> int:
    """Run the files of the list, all or those that match, and write the page where all ran."""
    variables = prepare(INSTALL_V2 if table == "v2" else INSTALL)
    # read at import
    os.environ.update({key: value for key, value in variables.items() if key.startswith("HF_")})
    import vllm

    entries, reasons = listed(table), tomllib.loads(LIST.read_text())["reasons"]
    chosen = [
        e
        for e in entries
        if not patterns or any(fnmatch.fnmatch(e["name"], f"*{pattern}*") for pattern in patterns)
    ]
    if table == "v2":
        tests = on_npu(tests, [entry["name"] for entry in chosen if entry.get("npu")])
    warm_up(tests, variables)
    wrong = 0
    for number, entry in enumerate(chosen, 1):
        started = time.monotonic()
        lines = judged(entry, run(tests, entry["name"], variables, deadline), reasons)
        print(
            f"[{time.monotonic() - started:4.0f} s {number}/{len(chosen)}] {entry['name']}:"
            f" {'; '.join(lines) or 'as listed'}",
            flush=True,
        )
        wrong += bool(lines)
    if not patterns and table == "files":
        REPORT.write_text(
            report(entries, listed("v2"), reasons, vllm.__version__.partition("+")[0])
        )
    return 1 if wrong else 0


def main_v2(tests: Path, patterns: list[str], deadline: float) -> int:
    """Run those of the V2 runner with the Python of an environment of tools/compat."""
    found = (
        environment.ROOT / ".compat" / f"{V2_VLLM}{suffix}" / "bin" / "python"
        for suffix in ("", "-quick")
    )
    python = next((path for path in found if path.exists()), None)
    if python is None:
        sys.exit(
            f"upstream: there is no environment with vLLM {V2_VLLM}; fix: tools/compat --quick"
            f" {V2_VLLM}"
        )
    command = [
        python,
        "-m",
        "ascend_emulator.cli",
        "run",
        "--npus",
        "1",
        "--",
        python,
        "-m",
        __name__,
        tests,
        deadline,
        *patterns,
    ]
    variables = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parents[1]),
    }
    return subprocess.run(
        [*map(str, command)], cwd=Path(__file__).parents[1], env=os.environ | variables, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:], float(sys.argv[2]), "v2"))
