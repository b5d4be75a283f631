# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The workflows of continuous integration and of releases."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from harness import checkout
from harness.project import vllm_copy
from harness.project.clones import ATTENTION, META, PLATFORM, Clone


def workflow(name: str) -> dict:
    loaded = yaml.safe_load((checkout.ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    # YAML 1.1 reads `on` as true
    return {("on" if key is True else key): value for key, value in loaded.items()}


def scripts(job: dict) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_workflows_pin_actions_and_hold_no_secret() -> None:
    """A hash, as a tag can be moved; its version is in a comment."""
    paths = sorted((checkout.ROOT / ".github" / "workflows").glob("*.yml"))
    assert {"ci", "codeql", "docs", "release"} <= {path.stem for path in paths}
    for path in paths:
        text = path.read_text()
        assert "secrets." not in text
        assert text.count("uses: ") == len(
            re.findall(r"uses: \S+@[0-9a-f]{40}  # v\d+(?:\.\d+)*$", text, re.MULTILINE)
        )
        for job in workflow(path.stem)["jobs"].values():
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert [
                action
                for action in used
                if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action)
            ] == []


def test_job_that_may_publish_builds_nothing() -> None:
    release = workflow("release")
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert release["permissions"] == {}
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == ["build", "libs", "smoke"]
    assert release["jobs"]["libs"]["permissions"] == {"contents": "read"}
    assert publish["environment"] == "pypi"
    assert scripts(publish) == []
    used = [step["uses"].split("@")[0] for step in publish["steps"]]
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert "environment" not in build
    for path in (checkout.ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = workflow(path.stem)["jobs"].items()
        privileged = [name for name, job in jobs if "id-token" in str(job.get("permissions"))]
        assert privileged == (["publish"] if path.stem == "release" else [])
        assert "id-token" not in str(workflow(path.stem).get("permissions"))


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    assert "\ntools/test  " in (checkout.ROOT / "README.md").read_text()
    (script,) = scripts(workflow("ci")["jobs"]["test"])
    assert script.splitlines()[1:] == [".ci/run $PART"]  # after a remark for shellcheck
    assert '\n"") run tools/test ;;\n' in (checkout.ROOT / ".ci" / "run").read_text()


def test_parts_of_continuous_integration_cover_all_tests() -> None:
    parts = workflow("ci")["jobs"]["test"]["strategy"]["matrix"]["part"]
    covered = [path for part in parts for path in part.split()]
    roots = [checkout.ROOT / "packages", checkout.ROOT / "tests"]
    folders = {
        str(path.relative_to(checkout.ROOT))
        for root in roots
        for path in root.iterdir()
        if any(path.glob("**/test_*.py"))
    }
    assert len(folders) > 8
    assert sorted(covered) == sorted({*folders, "compat"})


def test_continuous_integration_covers_the_wheels_versions() -> None:
    jobs = workflow("ci")["jobs"]
    minors = tomllib.loads((checkout.TOOLS / "versions" / "compat.toml").read_text())
    assert jobs["vllm"]["strategy"]["matrix"]["vllm"] == [*minors]
    of_tests = next(
        step["with"]["python-version"]
        for step in jobs["test"]["steps"]
        if "with" in step and "python-version" in step["with"]
    )
    project = tomllib.loads((checkout.ROOT / "packages" / PLATFORM / "pyproject.toml").read_text())[
        "project"
    ]
    pythons = [of_tests, *jobs["python"]["strategy"]["matrix"]["python"]]
    assert [f"Programming Language :: Python :: {each}" for each in pythons] == [
        each for each in project["classifiers"] if re.fullmatch(r".*Python :: \d\.\d+", each)
    ]


def test_weekly_job_names_what_moved_in_the_newest_vllm(tmp_path: Path) -> None:
    """The job's own command, on this vLLM and on one without the V1 runner's class."""
    job = workflow("ci")["jobs"]["newest-vllm"]
    assert "schedule" in job["if"]
    install, *_, command = scripts(job)
    assert install == "pip install --no-deps --target newest vllm"
    tree = vllm_copy.make(tmp_path / "newest")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.split(), cwd=tree.parent, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )  # fmt: skip

    same = check()
    assert same.returncode == 0, same.stdout + same.stderr
    slots = tree / "vllm" / "v1" / "worker" / "block_table.py"
    source = slots.read_text().replace("class ComputeSlotMappingKernel", "class Moved")
    slots.unlink()
    slots.write_text(source)
    moved = check()
    assert moved.returncode == 1
    assert "block_table:ComputeSlotMappingKernel.kernel is missing" in moved.stdout


@pytest.mark.parametrize("name", [ATTENTION, META])
def test_build_job_builds_what_the_tag_names(clone: Clone, name: str) -> None:
    """The job's own commands, in a clone with the tag of a release."""
    clone.fragment(META, "is a set.")
    for other in clone.packages:
        clone.git("tag", f"{other}-v0.1.2")
    clone.commit()
    assert clone.release(name, "minor").returncode == 0
    uv, settings = checkout.find_uv()
    tag = f"{name}-v0.2.0"
    path = f"{Path(uv).parent}{os.pathsep}{settings['PATH']}"
    for script in scripts(workflow("release")["jobs"]["build"]):
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(
            command,
            cwd=clone.root,
            env={**settings, "PATH": path, "GITHUB_REF_NAME": tag},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
    module = name.replace("-", "_")
    built = {file.name for file in (clone.root / "dist").iterdir()} - {".gitignore"}
    assert built == {f"{module}-0.2.0-py3-none-any.whl", f"{module}-0.2.0.tar.gz"}


def test_notes_of_a_release_are_its_section_of_the_changelog(clone: Clone) -> None:
    """The job's own commands, with a `gh` that does nothing."""
    assert clone.release(ATTENTION, "minor").returncode == 0
    (clone.root / "dist").mkdir()
    (clone.root / "dist" / "file").touch()
    (clone.root / "gh").write_text("#!/bin/sh\n")
    (clone.root / "gh").chmod(0o755)
    *_, script = scripts(workflow("release")["jobs"]["github"])
    variables = {
        "PATH": f"{clone.root}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_REF_NAME": f"{ATTENTION}-v0.2.0",
    }
    subprocess.run(["bash", "-ec", script], cwd=clone.root, env=variables, check=True)
    notes = (clone.root / "NOTES.md").read_text()
    entries = "### Added - computes attention faster. (#12) ### Fixed - rounds as it should. (#7)"
    assert " ".join(notes.split()) == entries


def test_tags_of_releases_start_the_workflow() -> None:
    """The filter is a glob of GitHub's; written as an expression, it takes the tags of
    tools/release and no others."""
    [pattern] = workflow("release")["on"]["push"]["tags"]
    assert pattern == "*-v[0-9]+.[0-9]+.[0-9]+"
    expression = pattern.replace(".", r"\.").replace("*", "[^/]*")
    assert re.fullmatch(expression, "ascend-attention-v0.2.10")
    assert not re.fullmatch(expression, "v0.2.0")
    assert not re.fullmatch(expression, "ascend-attention-v0.2.0rc1")
