# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm-ascend patches list|check|new``."""

import json
import subprocess
import sys
from pathlib import Path

from ascend_patches.registry import discover, in_range
from ascend_platform import extension
from ascend_platform.overrides import table

TARGET = "vllm.v1.engine.core:EngineCoreProc.run_busy_loop"


def test_list_says_what_applies_and_why_not(world, command):
    world.victim("m", "def a():\n    pass\n\n\ndef b():\n    pass\n")
    world.patch("a", "victim.m:a", "original")
    world.patch("b", "victim.m:b", "original", vllm="<0.1")
    world.patch("c", "victim.m:c", "original", fingerprint="0")
    status, out, _ = command("list")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("p.")]
    assert lines[0] == "p.a: applies (platform, vLLM >=0, victim.m:a): r"
    assert "is outside its range <0.1" in lines[1]
    assert "victim.m does not define c" in lines[2]
    applied = sum(in_range(each, extension.version("vllm")) for each in discover())
    count = len(extension.overrides())
    last = out.splitlines()[-1]
    assert last.startswith(f"{1 + applied} of {3 + len(discover())} patches apply to vLLM ")
    assert last.endswith(f", and {count} of {count} overrides")
    grouped = next(
        line for line in out.splitlines() if line.startswith("grouped_topk_router.grouped_topk: ")
    )
    assert grouped.startswith(
        "grouped_topk_router.grouped_topk: applies (replaced, vLLM 0.31, vllm.model_executor."
    )
    world.variables["VLLM_ASCEND_DISABLE_PATCHES"] = "p.a"
    assert "p.a: disabled" in command("list")[1]
    (first,) = (each for each in json.loads(command("list", "--json")[1]) if each["name"] == "p.a")
    assert (first["state"], first["why"]) == ("disabled", "listed in VLLM_ASCEND_DISABLE_PATCHES")


def test_check_reads_a_given_vllm_and_fails_when_it_has_drifted(world, command, tmp_path):
    name, _, qualname = TARGET.partition(":")
    text = extension.module_source(name)
    world.patch(
        "loop", TARGET, "original", fingerprint=extension.fingerprint(text, qualname), vllm=">=0.32"
    )
    assert command("check")[0] == 0
    tree = tmp_path / "tree"
    core = tree / "vllm" / "v1" / "engine" / "core.py"
    core.parent.mkdir(parents=True)
    core.write_text(
        "raise SystemExit('imported')\n"
        + text.replace("def run_busy_loop(self)", "def run_busy_loop(self, more)")
    )
    (tree / "vllm-0.40.0.dist-info").mkdir()
    status, out, _ = command("check", "--vllm", str(tree))
    assert status == 1
    assert "p.loop: differs" in out
    overrides = extension.overrides(tree)  # The tree has one of their modules.
    drifted = sum(not each["target"].startswith("vllm.v1.engine.core:") for each in overrides)
    last = (
        f"1 of {1 + len(discover())} patches and {drifted} of {len(overrides)} overrides differ"
        " from vLLM 0.40.0"
    )
    assert out.splitlines()[-1] == last
    world.variables["VLLM_VERSION"] = "0.31"
    assert "p.loop: out of range" in command("check", "--vllm", str(tree))[1]
    status, _, stderr = command("check", "--vllm", str(tmp_path / "nothing"))
    assert (status, "has no directory vllm" in stderr) == (2, True)


def test_new_makes_what_is_found_applied_and_unfinished(world, command, tmp_path):
    package = tmp_path / "wheel"
    (package / "src" / "somebody" / "patches").mkdir(parents=True)
    notice = "# SPDX-License-Identifier: MIT\n"
    (package / "src" / "somebody" / "patches" / "__init__.py").write_text(f'{notice}"""Ours."""\n')
    status, out, _ = command("new", TARGET, "--scope", "engine", "--package", str(package))
    assert status == 0
    patch_file, test, rows = map(Path, out.split())
    assert patch_file.name == "patch_core.py"
    (patch,) = table.read(rows, "somebody.patches")
    assert (patch.name, patch.scope, patch.target) == (
        "core.enginecoreproc_run_busy_loop",
        "engine",
        TARGET,
    )
    assert patch.optional
    assert patch.problem() == ""
    assert all(path.read_text().startswith(f'{notice}"""') for path in (patch_file, test))
    lint = [sys.executable, "-m", "ruff"]
    subprocess.run(
        [*lint, "check", "--isolated", "--line-length=100", patch_file, test], check=True
    )
    subprocess.run(
        [*lint, "format", "--isolated", "--line-length=100", "--check", patch_file, test],
        check=True,
    )
    status, _, stderr = command("new", TARGET, "--scope", "engine", "--package", str(package))
    assert (status, "exists; add to it by hand, with fingerprint" in stderr) == (2, True)
    status, _, stderr = command(
        "new", "vllm.v1.engine.core:Nothing", "--scope", "engine", "--package", str(package)
    )
    assert (status, "is not defined in what is installed" in stderr) == (2, True)
