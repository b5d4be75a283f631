# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run PyTorch's own device tests on an emulated NPU, and compare with what real NPUs say (see
tools/upstream)."""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import os
import subprocess
import sys
import time
import tomllib
import types
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import environment
from upstream_tests import pytorch_report, pytorch_verdicts, run

HOME = environment.ROOT / ".upstream" / "pytorch-run"
REPORT = environment.ROOT / "docs" / "reports" / "pytorch-tests.md"
SETTINGS = environment.ROOT / "tools" / "upstream_tests" / "pytorch.toml"
NEEDS = ["scipy", "opt_einsum"]  # of the test files
PASSED = {"passed", "skipped", "other chip"}


def prepare() -> None:
    """Install additional requirements of the tests, and set what PyTorch's tests read from the
    environment."""
    extra = HOME / "packages"
    if not (extra / NEEDS[-1]).exists():
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
    sys.path.append(str(extra))
    os.environ["PYTORCH_TESTING_DEVICE_FOR_CUSTOM"] = "privateuse1"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"


def perform(tests: Path, name: str, device: str, choose: Callable, options: dict) -> None:
    """Run cases of one file, whose module is imported once and forked; results are kept while they
    come.

    Args:
        device: `privateuse1`, or `cpu` for the control.
        choose: from the device's cases to those to be run, with what each is chosen for.
    """
    import torch.testing._internal.common_utils

    path, kept = tests / name, _kept(device, name)
    cases = results(device, [name]).get(name, {}).get("cases", {})
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = device
    os.chdir(tests)
    sys.path.insert(0, str(tests))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    started = saved = time.monotonic()
    source = path.read_text()
    if options["older"]:
        from upstream_tests import pytorch_older

        source = pytorch_older.adapt(name, source)
    run.load(module, str(path), source, [torch.testing._internal.common_utils])
    chosen = choose(_names(module))
    print(
        f"{device} {name}: loaded in {time.monotonic() - started:.0f} s, {len(chosen)} cases",
        flush=True,
    )

    def keep(complete: bool) -> None:
        told = {case: {**told, "for": chosen[case]} for case, told in cases.items()}
        new = kept.with_suffix(".new")
        new.write_text(
            json.dumps({"identity": options["identity"], "complete": complete, "cases": told})
        )
        new.replace(kept)

    complete = not chosen
    logs = HOME / "logs" / device
    file = run.File(
        path, name, False, options["deadline"], logs, loaded=module, chosen=[*chosen], cases=cases
    )
    try:
        while not (complete := file.step()) and time.monotonic() < options["until"]:
            time.sleep(0.02)
            if time.monotonic() > saved + 10:
                keep(complete=False)
                saved = time.monotonic()
    finally:
        file.kill()
    keep(complete)
    counts = ", ".join(
        f"{count} {outcome}"
        for outcome, count in Counter(c["outcome"] for c in cases.values()).items()
    )
    print(
        f"{device} {name}: {'' if complete else 'not done: '}{counts};"
        f" {time.monotonic() - started:.0f} s",
        flush=True,
    )


def _names(module: types.ModuleType) -> list[str]:
    """The cases of a test file that are for a device."""
    classes = [
        c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)
    ]
    named = [
        c
        for c in classes
        if c.__module__ == "__main__" and c.__name__.endswith(("PRIVATEUSE1", "NPU", "CPU"))
    ]
    return [
        f"{c.__name__}::{name}"
        for c in named
        for name in unittest.defaultTestLoader.getTestCaseNames(c)
    ]


def _kept(device: str, name: str) -> Path:
    return HOME / device / f"{name.replace('/', '-')}.json"


def results(device: str, names: list[str]) -> dict[str, dict]:
    """Results so far, by file."""
    return {
        name: json.loads(_kept(device, name).read_text())
        for name in names
        if _kept(device, name).exists()
    }


def _run(
    tests: Path,
    names: list[str],
    verdicts: pytorch_verdicts.Verdicts,
    settings: dict,
    options: dict,
) -> None:
    """Run files side by side, and what fails of each once more on the CPU."""
    import torch.testing._internal.common_methods_invocations  # noqa: F401

    for device in ("privateuse1", "cpu"):
        (HOME / device).mkdir(parents=True, exist_ok=True)
        for path in (HOME / device).glob("*.json"):
            if json.loads(path.read_text())["identity"] != options["identity"]:
                path.unlink()
    fork = multiprocessing.get_context("fork")
    waiting = [("privateuse1", name) for name in names]
    running: list[tuple[str, str, multiprocessing.process.BaseProcess | None]] = []
    while (waiting and time.monotonic() < options["until"]) or running:
        while waiting and len(running) < options["jobs"] and time.monotonic() < options["until"]:
            device, name = waiting.pop(0)
            done = results(device, [name]).get(name, {}).get("complete", False)
            choose = (
                _control(name) if device == "cpu" else _sample(name, verdicts, settings, options)
            )
            process: multiprocessing.process.BaseProcess | None = None
            if not done:
                process = fork.Process(target=perform, args=(tests, name, device, choose, options))
                process.start()
            running.append((device, name, process))
        for entry in list(running):
            device, name, process = entry
            if process and process.exitcode is None:
                continue
            running.remove(entry)
            if process and process.exitcode:
                print(f"{device} {name}: ended with {process.exitcode}", flush=True)
            elif device == "privateuse1" and results(device, [name])[name]["complete"]:
                waiting.append(("cpu", name))
        time.sleep(0.1)


def _sample(
    name: str, verdicts: pytorch_verdicts.Verdicts, settings: dict, options: dict
) -> Callable:
    return lambda found: pytorch_verdicts.choose(
        name, found, verdicts, settings, options["seed"], options["share"]
    )


def _control(name: str) -> Callable:
    """The cases that failed."""
    told = results("privateuse1", [name])[name]["cases"]
    failed = {
        pytorch_verdicts.on_cpu(case)
        for case, result in told.items()
        if result["outcome"] not in PASSED
    }
    return lambda found: dict.fromkeys((case for case in found if case in failed), "control")


def main(tests: Path, lists: list[Path], patterns: list[str], options: dict) -> int:
    """Run a sample of the cases for which there is a verdict, and write the page; again, it goes on
    where it was."""
    settings = tomllib.loads(SETTINGS.read_text())
    verdicts = pytorch_verdicts.read(lists)
    names = [
        name
        for name in settings["files"]
        if not patterns or any(fnmatch.fnmatch(name, f"*{p}*") for p in patterns)
    ]
    if not options["report"]:
        prepare()
        build = Path(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0]).name
        options["identity"] = {key: options[key] for key in ("seed", "share", "soc", "older")} | {
            "build": build
        }
        options["until"] = time.monotonic() + options["budget"]
        _run(tests, names, verdicts, settings, options)
    ran, control = results("privateuse1", settings["files"]), results("cpu", settings["files"])
    if not ran:
        sys.exit("upstream: nothing has been run yet")
    cases, pairs = (
        list(pytorch_report.judge(ran, control, verdicts, settings, what))
        for what in ("sample", "pair")
    )
    for name, judged in (("differences", cases), ("pairs", pairs)):
        (HOME / f"{name}.tsv").write_text(
            "".join(f"{row}\n" for row in pytorch_report.rows(judged))
        )
    identity = next(iter(ran.values()))["identity"]
    REPORT.write_text(pytorch_report.markdown(cases, pairs, identity, settings))
    print(f"upstream: wrote {REPORT}, and the differences to {HOME}")
    return 0
