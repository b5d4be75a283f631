# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend patches``: list and check patches of vLLM and overrides, and begin a
new patch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ascend_platform import extension
from packaging.version import Version

from ascend_patches.registry import (
    DISABLE,
    SCOPES,
    discover,
    environment_disabled,
    in_range,
    obstacle,
    overlap,
)

PATCH = '''"""{target}: TODO what is wrong with it."""

from collections.abc import Callable
from typing import Any


def {function}(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return replacement
'''
TABLE = "about = 'Faults and restrictions of vLLM.'\noptional = true\n"
ROW = """[[override]]
target = "{target}"
by = "patch_{stem}:{function}"
scope = "{scope}"
vllm = "{vllm}"
why = "TODO what goes wrong without it"
upstream = "TODO address of the issue or pull request"
remove_when = "TODO the condition, for example: the lowest supported vLLM contains the fix"
sources = {{ "{minor}" = "{fingerprint}" }}
"""
TEST = '''"""The fault of {target}, and its correction by the patch {name}."""

import subprocess
import sys

import pytest

NAME = "{name}"
# In a separate process, because patches are per process; prints "right" if the behaviour is right.
SCRIPT = """
import sys
from ascend_patches import enter
enter("{scope}")
from {module} import {top}
raise SystemExit("TODO: use {qualname}, and print 'right' if it behaves")
"""


@pytest.mark.parametrize(
    ("disabled", "output"), [("", "right\\n"), (NAME, "")], ids=["patched", "without"]
)
def test_{function}(disabled, output, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout == output, done.stderr
'''


def add(parser: argparse.ArgumentParser) -> None:
    """List patches of vLLM and ascend-platform's overrides, compare them with a version of vLLM, or
    begin a new patch."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    lister = actions.add_parser(
        "list", help="which patches and overrides apply here, and why or why not"
    )
    lister.set_defaults(run=_list)
    checker = actions.add_parser(
        "check", help="compare them with vLLM's source; exit status 1 where something differs"
    )
    checker.add_argument(
        "--vllm",
        type=Path,
        metavar="DIR",
        help="a checkout or site-packages, which is not imported",
    )
    checker.set_defaults(run=_check)
    for each in (lister, checker):
        each.add_argument("--json", action="store_true", help="print JSON")
    maker = actions.add_parser(
        "new", help="create the patch's file, its test and its row in overrides.toml"
    )
    maker.add_argument("target", help="package.module:qualified.name")
    maker.add_argument("--scope", choices=SCOPES, required=True)
    maker.add_argument(
        "--package",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory with src/ and tests/ (here)",
    )
    maker.set_defaults(run=_new)


def examine(options: argparse.Namespace) -> Iterator[tuple[str, str, str, str]]:
    """The doctor's lines about patches and overrides: title, state, finding and fix.

    The entry point of group ``vllm_ascend.checks``. A patch that is for another vLLM, or disabled
    by the user, is ok.
    """
    disabled, version = environment_disabled(), extension.version("vllm")
    for each in discover():
        if each.name in disabled:
            yield each.name, "ok", "disabled", ""
        elif not in_range(each, version):
            yield each.name, "ok", f"not for vLLM {version or '(not installed)'}", ""
        elif why := obstacle(each, version):
            without = f"export {DISABLE}={','.join(sorted({*disabled, each.name}))}"
            fix = f"upgrade the wheel that it is in, or disable it: {without}"
            yield each.name, "fail", f"disabled: {why}", fix
        else:
            yield each.name, "ok", f"fits vLLM {version}", ""
    for row in extension.overrides():
        if row["problem"]:
            yield row["name"], "fail", row["problem"], row["fix"]


def _list(options: argparse.Namespace) -> int:
    disabled, version = environment_disabled(), extension.version("vllm")
    off = extension.unmet("ascend-patches")
    if not extension.allowed("ascend_patches"):
        off = "ascend_patches is filtered out by VLLM_PLUGINS"
    taken: list[extension.Override] = []
    rows = []
    for each in discover():
        why = off or ("listed in VLLM_ASCEND_DISABLE_PATCHES" if each.name in disabled else "")
        why = why or obstacle(each, version)
        if not why and (other := next((other for other in taken if overlap(other, each)), None)):
            why = f"target {each.target} is patched by {other.name} already"
        if not why:
            taken.append(each)
        rows.append(_row(each, "disabled" if why else "applies", why or each.why))
    overrides = [_override_row(row, "applies") for row in extension.overrides()]
    fitting = sum(row["state"] == "applies" for row in overrides)
    counts = f"{len(taken)} of {len(rows)} patches apply to vLLM {version or '(not installed)'}"
    return _show(
        [*rows, *overrides], options.json, f"{counts}, and {fitting} of {len(overrides)} overrides"
    )


def _check(options: argparse.Namespace) -> int:
    tree = options.vllm
    if tree is not None and not (tree / "vllm").is_dir():
        raise ValueError(
            f"{tree} has no directory vllm; give a checkout of vLLM or a site-packages that"
            " contains it"
        )
    version = extension.version("vllm")
    if tree is not None:
        version = os.environ.get("VLLM_VERSION") or extension.tree_version(tree)
    rows = []
    for each in discover():
        problem, fits = obstacle(each, version, tree), in_range(each, version)
        state = "fits" if fits else "out of range"
        rows.append(_row(each, "differs" if fits and problem else state, problem))
    overrides = [_override_row(row, "fits") for row in extension.overrides(tree or _installed())]
    patches_differ, overrides_differ = (
        sum(row["state"] == "differs" for row in each) for each in (rows, overrides)
    )
    last = (
        f"{patches_differ} of {len(rows)} patches and {overrides_differ} of {len(overrides)}"
        " overrides differ from vLLM "
    )
    _show([*rows, *overrides], options.json, last + (version or "of unknown version"))
    return int(bool(patches_differ or overrides_differ))


def _installed() -> Path | None:
    """The directory that contains the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    locations = spec and spec.submodule_search_locations
    return Path(locations[0]).parent if locations else None


def _row(patch: extension.Override, state: str, why: str) -> dict[str, object]:
    names = ("name", "target", "scope", "vllm", "upstream", "remove_when")
    fields = {name: getattr(patch, name) for name in names} | {"reason": patch.why}
    fingerprints = {"fingerprints": [*patch.sources.values()]}
    return {"kind": "patch"} | fields | fingerprints | {"state": state, "why": why}


def _override_row(row: dict[str, str], fits: str) -> dict[str, object]:
    reason = row["why"] if fits == "applies" else ""
    state = "differs" if row["problem"] else fits
    return {"kind": "override", **row, "state": state, "why": row["problem"] or reason}


def _show(rows: Sequence[dict[str, object]], as_json: bool, last: str) -> int:
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(
                f"{row['name']}: {row['state']} ({row.get('scope', row.get('action'))}, vLLM"
                f" {row['vllm']}, {row['target']}): {row['why']}".rstrip(": ")
            )
        print(last)
    return 0


def _new(options: argparse.Namespace) -> int:
    module, _, qualname = options.target.partition(":")
    text = extension.module_source(module)
    fingerprint = extension.fingerprint(text, qualname) if text else ""
    if not fingerprint:
        raise ValueError(
            f"{options.target} is not defined in what is installed; name it"
            " package.module:qualified.name"
        )
    packages = list(options.package.glob("src/*/patches"))
    if len(packages) != 1:
        raise ValueError(
            f"{options.package.resolve()} has {len(packages)} directories src/*/patches; give another"
            " with --package"
        )
    stem = re.sub(r"\W", "_", module.rpartition(".")[2])
    function = re.sub(r"\W", "_", qualname).strip("_").lower()
    version = Version(extension.version("vllm"))
    fields = {
        "target": options.target,
        "scope": options.scope,
        "module": module,
        "qualname": qualname,
        "top": qualname.partition(".")[0],
        "function": function,
        "name": f"{stem}.{function}",
        "fingerprint": fingerprint,
        "stem": stem,
        "minor": f"{version.major}.{version.minor}",
        "vllm": f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}",
    }
    files = {
        packages[0] / f"patch_{stem}.py": PATCH,
        options.package / "tests" / f"test_patch_{stem}.py": TEST,
    }
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists; add to it by hand, with fingerprint {fingerprint}")
    package, table = packages[0] / "__init__.py", packages[0] / "overrides.toml"
    notice = re.match(r"(?:#.*\n)*", package.read_text() if package.is_file() else "")
    assert notice is not None  # The pattern matches any text.
    for path, template in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(notice[0] + template.format(**fields))
    rows = table.read_text() if table.exists() else TABLE
    table.write_text(f"{rows}\n{ROW.format(**fields)}")
    print(*files, table, sep="\n")
    return 0
