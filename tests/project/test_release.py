# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Releases by tools/release in scratch clones."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import checkout
from harness.project.clones import ATTENTION, META, PLATFORM, Clone, dependents, written
from packaging.requirements import Requirement
from packaging.version import Version

API_VERSION = re.compile(r'^API_VERSION = "(.*)"$', re.MULTILINE)


def test_minor_release_of_one_component(clone: Clone) -> None:
    before, files = (
        clone.git("rev-parse", "HEAD"),
        {name: clone.path(name).read_text() for name in clone.packages},
    )
    done = clone.release(ATTENTION, "minor")
    assert done.returncode == 0, done.stderr

    # One commit, on top of what there was, with the annotated tag; the checkout shows it and is
    # clean.
    assert clone.git("rev-parse", "HEAD^") == before
    assert clone.git("tag", "--points-at", "HEAD") == f"{ATTENTION}-v0.2.0"
    assert clone.git("cat-file", "-t", f"{ATTENTION}-v0.2.0") == "tag"
    assert clone.git("rev-parse", f"{ATTENTION}-v0.2.0^{{commit}}") == clone.git(
        "rev-parse", "HEAD"
    )
    assert clone.git("status", "--porcelain") == ""

    # The bump is the one changed line; no sibling and no range had to change.
    assert clone.path(ATTENTION).read_text() == files[ATTENTION].replace(
        'version = "0.1.2"', 'version = "0.2.0"'
    )
    unchanged = set(clone.packages) - {ATTENTION, META}
    assert all(clone.path(name).read_text() == files[name] for name in unchanged)

    # The fragments have become a section of the changelog.
    changelog = clone.path(ATTENTION, "CHANGELOG.md").read_text()
    sections = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)
    assert re.fullmatch(r"0\.2\.0 \(\d{4}-\d\d-\d\d\)", sections[1])
    added, fixed = "- computes attention faster. (#12)", "- rounds as it should. (#7)"
    assert [line for line in sections[2].splitlines() if line] == [
        "### Added",
        added,
        "### Fixed",
        fixed,
    ]
    assert not list(clone.path(ATTENTION, "changes").glob("*.md"))

    # The meta-package has a version of its own for the set, which is exact, and will say so in its
    # changelog.
    project = clone.project(META)
    assert project["version"] == "0.2.0"
    pins = {*project["dependencies"], *project["optional-dependencies"]["emulator"]}
    versions = {name: "0.2.0" if name == ATTENTION else "0.1.2" for name in clone.packages}
    assert pins == {f"{name}=={version}" for name, version in versions.items() if name != META}
    assert [path.read_text() for path in clone.path(META, "changes").iterdir()] == [
        f"pins {ATTENTION} 0.2.0.\n"
    ]
    subprocess.run(
        [sys.executable, "tools/versions/pin_meta.py", "--check"], cwd=clone.root, check=True
    )
    subprocess.run(
        [sys.executable, "tools/docs-tables", "--only", "versions", "--check"],
        cwd=clone.root,
        check=True,
    )
    assert (
        "| `ascend-attention` | 0.2.0 |" in (clone.root / "docs" / "compatibility.md").read_text()
    )


@pytest.mark.parametrize(
    ("old", "level", "new", "expected"),
    [
        ("0.1.2", "patch", "0.1.3", ">=0.1,<0.2"),
        ("0.1.2", "minor", "0.2.0", ">=0.1,<0.3"),
        ("0.1.2", "major", "1.0.0", ">=0.1,<2"),
        ("1.4.0", "minor", "1.5.0", ">=0.1,<2"),
        ("1.4.0", "major", "2.0.0", ">=0.1,<3"),
    ],
)
def test_ranges_of_siblings_follow_the_platform(
    clone: Clone, old: str, level: str, new: str, expected: str
) -> None:
    clone.set_version(PLATFORM, old)
    siblings = dependents(clone)
    assert len(siblings) == 9
    if Version(old).major:
        for name in siblings:
            clone.edit(clone.path(name), f"{PLATFORM}>=0.1,<0.2", f"{PLATFORM}>=0.1,<2")
    clone.commit()
    before = {name: written(clone, name, PLATFORM) for name in siblings}
    done = clone.release(PLATFORM, level)
    assert done.returncode == 0, done.stderr
    assert clone.version(PLATFORM) == new
    for name in siblings:
        assert written(clone, name, PLATFORM) == f"{PLATFORM}{expected}"
        assert clone.version(name) == "0.1.2"
        moved = before[name] != f"{PLATFORM}{expected}"
        assert (
            f"{name} required {Requirement(before[name])}; now {PLATFORM}" in done.stdout
        ) == moved
        fragments = [path.read_text() for path in clone.path(name, "changes").glob("+admits*")]
        assert fragments == ([f"admits {PLATFORM} {new}.\n"] if moved else [])
    assert f"{PLATFORM}=={new}" in clone.project(META)["dependencies"]


def test_set_is_released_when_it_can_be_installed(clone: Clone) -> None:
    """The meta-package waits for the components that it pins, and has one version however many of
    them there were."""
    for name in clone.packages:
        if name not in (META, ATTENTION):
            clone.git("tag", f"{name}-v0.1.2")
    assert clone.release(PLATFORM, "patch").returncode == 0
    assert clone.version(META) == "0.1.3"
    before = clone.state()
    done = clone.release(META, "patch")
    assert (
        f"{META} pins {ATTENTION}==0.1.2, which has no tag {ATTENTION}-v0.1.2: release that first"
        in done.stderr
    )
    assert clone.state() == before

    assert clone.release(ATTENTION, "patch").returncode == 0
    assert clone.version(META) == "0.1.3"
    clone.fragment(PLATFORM, "starts sooner still.")
    clone.commit()
    assert clone.release(PLATFORM, "minor").returncode == 0
    assert clone.version(META) == "0.2.0"
    waiting = [
        name for name in clone.packages if list(clone.path(name, "changes").glob("+admits*"))
    ]
    assert len(waiting) == 9
    for name in waiting:
        done = clone.release(META, "minor")
        tag = f"{name}-v{clone.version(name)}"
        assert f"but {tag} requires {PLATFORM}<0.2,>=0.1: release {name} first" in done.stderr
        assert clone.release(name, "patch").returncode == 0

    done = clone.release(META, "minor")
    assert done.returncode == 0, done.stderr
    assert clone.version(META) == "0.2.0"
    assert f"{META}-v0.2.0" in clone.git("tag", "--points-at", "HEAD")
    changelog = clone.path(META, "CHANGELOG.md").read_text()
    assert f"- pins {PLATFORM} 0.2.0." in changelog
    assert f"- pins {ATTENTION} 0.1.4." in changelog
    assert (
        clone.release(ATTENTION, "minor").stderr
        == f"tools/release: packages/{ATTENTION}/changes has no fragments, so there is nothing to"
        " release\n"
    )


def test_first_releases_have_file_versions_and_install_together(
    clone: Clone, tmp_path: Path
) -> None:
    """All packages in the order of their requirements, each built from its tag, in an empty
    environment."""
    clone.git("tag", "--delete", *clone.git("tag").split())
    components = [name for name in clone.packages if name not in (META, PLATFORM)]
    for name in clone.packages:
        changelog = clone.path(name, "CHANGELOG.md")
        changelog.write_text(
            re.split(r"^## ", changelog.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
        )
        clone.fragment(name, "is new.", "1.added.md")
    for name in dependents(clone):
        clone.edit(clone.path(name), f"{PLATFORM}>=0.1,", f"{PLATFORM}>=0.1.2,")
    clone.commit()
    done = clone.release(ATTENTION)
    assert (
        f"{ATTENTION} requires {PLATFORM}<0.2,>=0.1.2, and {PLATFORM} 0.1.2 was never released"
        in done.stderr
    )
    for name in (PLATFORM, *components, META):
        done = clone.release(name)
        assert done.returncode == 0, done.stderr
        assert f"{name} 0.1.2, its first release\n" in done.stdout
        assert re.search(
            r"^## 0\.1\.2 \(.*\n\n### Added\n\n(.*\n)*- is new\. \(#1\)$",
            clone.path(name, "CHANGELOG.md").read_text(),
            re.M,
        )
    tags = [f"{name}-v0.1.2" for name in clone.packages]
    assert clone.git("tag").split() == tags

    uv, settings = checkout.find_uv()
    dist, venv = tmp_path / "dist", tmp_path / "venv"

    def uv_run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [uv, *map(str, command)],
            cwd=clone.root,
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )

    for name in clone.packages:
        clone.git("checkout", "--quiet", f"{name}-v0.1.2")
        assert (
            uv_run("build", "--quiet", "--wheel", "--package", name, "--out-dir", dist).returncode
            == 0
        )
    assert (
        uv_run("venv", "--quiet", "--no-project", "--python", sys.executable, venv).returncode == 0
    )
    assert (
        uv_run(
            "pip", "install", "--no-deps", "--no-index", "--python", venv, *dist.glob("*.whl")
        ).returncode
        == 0
    )
    missing = re.findall(r"requires `([\w-]+)", uv_run("pip", "check", "--python", venv).stderr)
    assert "vllm" in missing
    assert not {*missing} & {*clone.packages}

    # A resolver's result for the set's name, with only these wheels available.
    requirements = {
        it.name
        for name in clone.packages
        for it in map(Requirement, clone.project(name)["dependencies"])
    } - {*clone.packages}
    (tmp_path / "excluded.txt").write_text("\n".join(sorted(requirements)))
    (tmp_path / "wanted.in").write_text(f"{META}[emulator]")
    options = (
        "--quiet",
        "--no-config",
        "--no-index",
        "--no-header",
        "--no-annotate",
        "--find-links",
        dist,
    )
    done = uv_run(
        "pip", "compile", *options, "--excludes", tmp_path / "excluded.txt", tmp_path / "wanted.in"
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^([\w-]+)(?:\[emulator\])?==0\.1\.2$", done.stdout, re.M) == clone.packages


def test_first_release_has_the_description_of_the_changelog(clone: Clone) -> None:
    """Without fragments that compare with versions that were never released."""
    clone.git("tag", "--delete", *clone.git("tag").split())
    for name in (PLATFORM, "ascend-emulator"):
        changelog = clone.path(name, "CHANGELOG.md")
        head = changelog.read_text().partition("\n## ")[0].rstrip()
        changelog.write_text(f"{head}\n\n## Unreleased\n\nNPUs.\n\n### Models\n\n- Serve models.\n")
    clone.fragment(PLATFORM, "Serve images.", "12.added.1.md")
    clone.fragment(PLATFORM, "Serve faster.", "13.changed.2.md")
    clone.commit()
    for name, added in [
        (PLATFORM, "\n### Added\n\n- Serve images. (#12)\n"),
        ("ascend-emulator", ""),
    ]:
        done = clone.release(name)
        assert done.returncode == 0, done.stderr
        _, section = clone.path(name, "CHANGELOG.md").read_text().split("\n## ")
        title, _, text = section.partition("\n\n")
        assert title.startswith("0.1.2 (")
        assert text == f"NPUs.\n\n### Models\n\n- Serve models.\n{added}"
        assert list(clone.path(name, "changes").glob("*.md")) == []


def test_dry_run_shows_the_commit_and_makes_nothing(clone: Clone) -> None:
    before = clone.state()
    done = clone.release(ATTENTION, "minor", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"{ATTENTION} 0.1.2 -> 0.2.0" in done.stdout
    assert '+version = "0.2.0"' in done.stdout
    assert f"{ATTENTION}-v0.2.0" in done.stdout
    assert clone.state() == before


def no_such_package(clone: Clone) -> tuple[str, str]:
    return "ascend-atention", f"no package ascend-atention; there are {', '.join(clone.packages)}"


def changed_file(clone: Clone) -> tuple[str, str]:
    clone.edit(clone.root / "README.md", "# vllm-ascend-all", "# edited")
    return ATTENTION, "the checkout has changes (M README.md): commit or stash them"


def new_file(clone: Clone) -> tuple[str, str]:
    clone.fragment(ATTENTION, "is not committed.", "8.fixed.md")
    return (
        ATTENTION,
        (
            f"the checkout has changes (?? packages/{ATTENTION}/changes/8.fixed.md): commit or"
            " stash them"
        ),
    )


def no_fragments(clone: Clone) -> tuple[str, str]:
    return (
        "ascend-patches",
        "packages/ascend-patches/changes has no fragments, so there is nothing to release",
    )


def misnamed_fragment(clone: Clone) -> tuple[str, str]:
    clone.fragment(ATTENTION, "is new.", "9.feature.md")
    clone.commit()
    wrong = (
        f"packages/{ATTENTION}/changes/9.feature.md is not called"
        " <issue>.<added|changed|fixed|removed>.md"
    )
    return ATTENTION, wrong


def tag_exists(clone: Clone) -> tuple[str, str]:
    clone.git("tag", f"{ATTENTION}-v0.1.3")
    return ATTENTION, f"the tag {ATTENTION}-v0.1.3 exists already"


def range_without_the_patch(clone: Clone) -> tuple[str, str]:
    clone.edit(clone.path("ascend-patches"), f"{PLATFORM}>=0.1,<0.2", f"{PLATFORM}>=0.1,<0.1.3")
    clone.commit()
    return (
        PLATFORM,
        (
            f"ascend-patches requires {PLATFORM}<0.1.3,>=0.1, which leaves out 0.1.3: correct that"
            " range first"
        ),
    )


def another_vllm_in_a_patch(clone: Clone) -> tuple[str, str]:
    """Siblings that were released before would admit the platform of the new range."""
    clone.edit(clone.path(PLATFORM), "vllm>=0.31,", "vllm>=0.32,")
    clone.commit()
    before, now = (f"vllm<0.34,>=0.3{minor}" for minor in "12")
    return PLATFORM, f"{PLATFORM} requires {now}, and {PLATFORM}-v0.1.1 {before}: raise minor"


def level_of_a_first_release(clone: Clone) -> tuple[str, str]:
    clone.git("tag", "--delete", f"{ATTENTION}-v0.1.0", f"{ATTENTION}-v0.1.1")
    return (
        ATTENTION,
        (
            f"{ATTENTION} has no release yet; its first is 0.1.2, as its pyproject.toml says: leave"
            " out patch"
        ),
    )


def clone_without_tags(clone: Clone) -> tuple[str, str]:
    assert clone.release(ATTENTION, "minor").returncode == 0
    clone.fragment(ATTENTION, "is faster still.")
    clone.commit()
    clone.git("tag", "--delete", *clone.git("tag").split())
    return (
        ATTENTION,
        (
            f"the changelog of {ATTENTION} lists a release, which has no tag in this clone: run git"
            " fetch --tags"
        ),
    )


def bound_that_was_never_released(clone: Clone) -> tuple[str, str]:
    clone.edit(clone.path(ATTENTION), f"{PLATFORM}>=0.1,<0.2", f"{PLATFORM}>=0.1.2,<0.2")
    clone.commit()
    return (
        ATTENTION,
        f"{ATTENTION} requires {PLATFORM}<0.2,>=0.1.2, and {PLATFORM} 0.1.2 was never released",
    )


def bound_below_the_interface(clone: Clone) -> tuple[str, str]:
    """The sibling uses what has been added to the platform since the oldest version that
    it admits."""
    register = clone.path(ATTENTION, "src/ascend_attention/__init__.py")
    stated = {
        path: API_VERSION.findall(path.read_text())
        for path in clone.path(PLATFORM, "src").rglob("*.py")
    }
    [(file, [api])] = [each for each in stated.items() if each[1]]
    clone.edit(file, f'API_VERSION = "{api}"', f'API_VERSION = "{api}1"')
    register.write_text(re.sub(r'api="[\d.]+"', f'api="{api}1"', register.read_text()))
    clone.commit()
    written = f"{ATTENTION} is written against version {api}1 of ascend_platform.extension"
    return (
        ATTENTION,
        (
            f"{written} and admits {PLATFORM} 0.1, which has {api}: raise the bound of"
            f" {PLATFORM}<0.2,>=0.1"
        ),
    )


def refusing_hook(clone: Clone) -> tuple[str, str]:
    hook = clone.root / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    hook.chmod(0o755)
    return ATTENTION, "`git commit --quiet` failed: not today"


def locked_checkout(clone: Clone) -> tuple[str, str]:
    """Fails last of all, when the tag has been made and the checkout should move to the commit."""
    (clone.root / ".git" / "index.lock").touch()
    return ATTENTION, "`git merge --quiet` failed: "


@pytest.mark.parametrize(
    "spoil",
    [
        no_such_package,
        changed_file,
        new_file,
        no_fragments,
        misnamed_fragment,
        tag_exists,
        range_without_the_patch,
        another_vllm_in_a_patch,
        level_of_a_first_release,
        clone_without_tags,
        bound_that_was_never_released,
        bound_below_the_interface,
        refusing_hook,
        locked_checkout,
    ],
)
def test_refusal_is_one_line_and_leaves_all_as_it_was(
    clone: Clone, spoil: Callable[[Clone], tuple[str, str]]
) -> None:
    name, line = spoil(clone)
    before = clone.state()
    done = clone.release(name, "patch")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"tools/release: {line}")
    assert done.stderr.count("\n") == 1
    assert clone.state() == before
