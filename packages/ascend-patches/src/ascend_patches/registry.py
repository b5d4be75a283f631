# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The declaration of patches, their discovery by entry point, and their comparison with a version
of vLLM."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ascend_platform import extension
from packaging.specifiers import SpecifierSet

SCOPES = ("platform", "engine", "worker")
GROUP = "vllm_ascend.patches"
"""Entry points of this group name a package with files ``patch_*.py``. VLLM_PLUGINS filters them by
their name."""


@dataclass(frozen=True)
class Patch:
    """One patch; see :func:`patch` for the fields."""

    name: str
    make: Callable[[Any], Any]
    target: str
    scope: str
    vllm: str
    reason: str
    upstream: str
    remove_when: str
    fingerprints: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    def overlaps(self, other: Patch) -> bool:
        """Whether both have the same target, or one's target contains the other's."""
        a, b = f"{self.target}.", f"{other.target}."
        return a.startswith(b) or b.startswith(a)

    def obstacle(self, version: str, text: str | None) -> str:
        """The reason why it does not apply to this version of vLLM and this source of the target's
        module; "" if it does.

        Args:
            version: of vLLM; "" skips the check of the range.
            text: the source of the target's module; None when there is no such module.
        """
        return (
            self.drift(text)
            if self.in_range(version)
            else f"vLLM {version} is outside its range {self.vllm}"
        )

    def in_range(self, version: str) -> bool:
        return not version or SpecifierSet(self.vllm).contains(version, prereleases=True)

    def drift(self, text: str | None) -> str:
        """The difference between the target and the source that the patch is for; "" if there is
        none."""
        if not (drift := extension.drift(self.target, self.fingerprints, text)):
            return ""
        return f"{drift}; compare the patch with the new source, or narrow its range {self.vllm}"


def patch(
    *,
    target: str,
    scope: str,
    vllm: str,
    reason: str,
    upstream: str,
    remove_when: str,
    fingerprint: str | Iterable[str],
) -> Callable[[Callable[[Any], Any]], Patch]:
    """Declare a patch. The decorated function takes the original and returns the replacement.

    The patch's name is the file's without ``patch_``, a dot, and the function's. Every process
    imports the files of patches, so they import vLLM inside functions only. For a static or class
    method the original is the underlying function, and the replacement becomes a static or class
    method, too.

    Args:
        target: ``package.module:qualified.name``, where the module itself defines the name.
        scope: ``platform`` (the main process, as early as plugins load), ``engine`` (the engine
            core, before its object is made) or ``worker`` (before the worker's class is imported).
        vllm: the versions that it is for, a PEP 440 specifier.
        reason: what fails without it, for the ledger.
        upstream: a reference, for the ledger.
        remove_when: the condition for its removal, for the ledger.
        fingerprint: of the target's source, as ``vllm-ascend patches new`` or ``check`` prints it;
            several if it differs between the versions of the range.

    Raises:
        ValueError: a malformed declaration.
    """

    def declare(make: Callable[[Any], Any]) -> Patch:
        name = f"{make.__module__.rpartition('.')[2].removeprefix('patch_')}.{make.__name__}"
        known = (fingerprint,) if isinstance(fingerprint, str) else tuple(fingerprint)
        if scope not in SCOPES:
            raise ValueError(
                f"patch {name} has scope {scope!r}; it must be one of {', '.join(SCOPES)}"
            )
        if not all(target.partition(":")) or not known:
            raise ValueError(
                f"patch {name} needs a fingerprint and a target of the form"
                " package.module:qualified.name"
            )
        SpecifierSet(vllm)
        return Patch(name, make, target, scope, vllm, reason, upstream, remove_when, known)

    return declare


def discover() -> list[Patch]:
    """All patches of installed packages that VLLM_PLUGINS allows, by name. A file that cannot be
    imported is logged."""
    patches: dict[str, Patch] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if not extension.allowed(point.name):
            continue
        try:
            package = point.load()
            names = [
                each.name
                for each in pkgutil.iter_modules(package.__path__)
                if each.name.startswith("patch_")
            ]
        except Exception as error:
            extension.logger.warning(
                "patches of %s disabled: %s: %s", point.value, type(error).__name__, error
            )
            continue
        for name in sorted(names):
            try:
                for each in collect(importlib.import_module(f"{package.__name__}.{name}")):
                    if patches.setdefault(each.name, each) is not each:
                        extension.logger.warning(
                            "duplicate patch %s from %s ignored",
                            each.name,
                            package.__name__,
                        )
            except Exception as error:
                extension.logger.warning(
                    "patches of %s disabled: %s: %s", name, type(error).__name__, error
                )
    return [patches[name] for name in sorted(patches)]


def collect(module: object) -> list[Patch]:
    """The patches that a module declares."""
    return [value for value in vars(module).values() if isinstance(value, Patch)]


def environment_disabled() -> set[str]:
    """Names in VLLM_ASCEND_DISABLE_PATCHES."""
    return set(
        filter(None, map(str.strip, os.environ.get("VLLM_ASCEND_DISABLE_PATCHES", "").split(",")))
    )
