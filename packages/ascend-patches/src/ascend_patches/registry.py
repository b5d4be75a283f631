# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Patches: the optional rows of the wheels' tables of overrides, and their comparison with a version
of vLLM."""

from __future__ import annotations

import os
from pathlib import Path

from ascend_platform import extension
from packaging.specifiers import InvalidSpecifier, SpecifierSet

SCOPES = ("platform", "engine", "worker")
DISABLE = "VLLM_ASCEND_DISABLE_PATCHES"


def discover() -> list[extension.Override]:
    """All patches of installed packages that VLLM_PLUGINS allows, by name. A malformed one is
    logged."""
    patches: dict[str, extension.Override] = {}
    for each in extension.optional_rows():
        if problem := _malformed(each):
            extension.logger.warning("patch %s ignored: %s", each.name, problem)
        elif patches.setdefault(each.name, each) is not each:
            extension.logger.warning("duplicate patch %s from %s ignored", each.name, each.package)
    return [patches[name] for name in sorted(patches)]


def _malformed(patch: extension.Override) -> str:
    """The error in a row; "" if there is none."""
    if patch.scope not in SCOPES:
        return f"it has scope {patch.scope!r}; supported: {', '.join(SCOPES)}"
    if not (patch.by and patch.sources):
        return "it needs by and sources"
    try:
        SpecifierSet(patch.vllm)
    except InvalidSpecifier as error:
        return str(error)
    return ""


def overlap(one: extension.Override, other: extension.Override) -> bool:
    """Whether both have the same target, or one target contains the other."""
    a, b = f"{one.target}.", f"{other.target}."
    return a.startswith(b) or b.startswith(a)


def in_range(patch: extension.Override, version: str) -> bool:
    """Whether a patch is for a version of vLLM; "" is for all."""
    return not version or SpecifierSet(patch.vllm).contains(version, prereleases=True)


def obstacle(patch: extension.Override, version: str, tree: Path | None = None) -> str:
    """The reason why a patch does not apply to this version of vLLM and its source; "" if it does.

    Args:
        version: of vLLM; "" skips the check of the range.
        tree: a checkout or a site-packages that contains vLLM; the installed one without.
    """
    if not in_range(patch, version):
        return f"vLLM {version} is outside its range {patch.vllm}"
    if not (problem := patch.problem(tree)):
        return ""
    return f"{problem}; compare the patch with the new source, or narrow its range {patch.vllm}"


def environment_disabled() -> set[str]:
    """Names in VLLM_ASCEND_DISABLE_PATCHES."""
    return set(filter(None, map(str.strip, os.environ.get(DISABLE, "").split(","))))
