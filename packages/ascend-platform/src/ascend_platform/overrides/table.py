# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rows of the tables of overrides, and the tables: a TOML file each, and what replaces the launches
of Triton kernels in ``launch_sites.csv``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from ascend_platform import fingerprint
from ascend_platform.overrides import launch_sites
from ascend_platform.overrides.launch_sites import GPU, SINCE
from ascend_platform.plugins import requirements

TABLES = ("common", "states", "v1", "v2")
"""The tables; V1's is absent once its runner is no longer supported."""


@dataclass(frozen=True)
class Override:
    """One name of vLLM.

    Attributes:
        target: ``package.module:qualified.name`` of the definition, or of the module's own
            ``torch``.
        why: what fails on the NPU without it.
        remove_when: the condition under which the entry can be deleted.
        sources: fingerprints of the source that it was written for, by the first minor version of
            vLLM that has that source.
        by: the replacement, or what is added, as ``module:name`` below ``ascend_platform``; ""
            where code decides it.
        action: what is done to it: ``replaced``, ``entries added``, ``kernel registered``,
            ``operator defined`` or ``used``.
        compared: the target whose source is compared, where it is not ``target`` itself.
        replaced_in: the modules whose name is replaced, if it is not only the defining module.
        kept_in: modules, or packages, that import the name with ``from … import`` and keep vLLM's
            own.
    """

    target: str
    why: str = ""
    remove_when: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    action: str = "replaced"
    compared: str = ""
    replaced_in: tuple[str, ...] = ()
    kept_in: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.qualname}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    def row(self, tree: Path | None = None) -> dict[str, str]:
        """A row of the table of overrides; see ``extension.overrides``."""
        named = {name: getattr(self, name) for name in ("name", "target", "action")}
        reasons = {"why": self.why, "remove_when": self.remove_when}
        problem = self.problem(tree)
        upgrade = f"{requirements.upgrade_command()}, or install an unedited release of vLLM"
        found = {"problem": problem, "fix": upgrade if problem else ""}
        return named | {"vllm": ", ".join(self.sources)} | reasons | found

    def problem(self, tree: Path | None = None) -> str:
        """The difference between a vLLM (of a source tree, or the installed one) and the supported
        ones; "" if there is none."""
        compared = self.compared or self.target
        if compared != self.target:
            source = fingerprint.module_source(self.module, tree)
            found = source is not None and (
                compared.endswith(".*") or fingerprint.fingerprint(source, self.qualname)
            )
            if not found:
                return fingerprint.drift(self.target, (), source)
        source = fingerprint.module_source(compared.partition(":")[0], tree)
        return fingerprint.drift(compared, self.sources.values(), source)


@functools.cache
def tables() -> dict[str, tuple[Override, ...]]:
    """The rows of each table."""
    found = {}
    for name in TABLES:
        file = Path(__file__).with_name(f"{name}.toml")
        if file.is_file():
            rows = tomllib.loads(file.read_text())["override"]
            launches = _of_launches() if name == "v2" else ()
            found[name] = (*map(_override, rows), *launches)
    return found


def rows(*names: str) -> list[Override]:
    """The rows of these tables, as far as they are present, or of all."""
    return [each for name in names or TABLES for each in tables().get(name, ())]


def v2_rows(tree: Path | None, version: str) -> list[dict[str, str]]:
    """The overrides for the V2 runner, and all launches, compared with a vLLM; none for one whose
    V2 runner is not supported.

    See ``extension.overrides``.
    """
    if not version or Version(version).release < Version(SINCE).release:
        return []
    return [each.row(tree) for each in (*rows("v2"), *launch_sites.sites())]


def _override(row: dict[str, Any]) -> Override:
    """A row of a TOML file; a fingerprint that it leaves out is in ``launch_sites.csv``."""
    lists: dict[str, Any] = {name: tuple(row.pop(name, ())) for name in ("replaced_in", "kept_in")}
    sources = row.pop("sources", None) or {SINCE: launch_sites.sources()[row["target"]]}
    return Override(**row, **lists, sources=sources)


def _of_launches() -> Iterator[Override]:
    """Functions of the V2 runner around Triton kernels, whose arguments do not contain what the
    host knows of a step; and kernels, through vLLM's registry of kernels."""
    for site in launch_sites.sites():
        if not site.replaces:
            continue
        is_kernel = site.replaces == "kernel"
        target = site.targets[0 if is_kernel else 1]
        importers = (target.partition(":")[0], *_modules(site.imported_by))
        yield Override(
            target,
            site.why,
            f"Triton runs on the NPU{'' if is_kernel else ', or vLLM has a PyTorch form of the kernel'}",
            {SINCE: launch_sites.sources()[target]},
            f"kernels.v2.{site.by}",
            "kernel registered" if is_kernel else "replaced",
            replaced_in=() if is_kernel else importers,
            kept_in=_modules(site.kept_in),
        )


def _modules(names: str) -> tuple[str, ...]:
    """Modules, by their names below vLLM's folder of the V2 runner or their full names."""
    return tuple(name if name.startswith("vllm.") else f"{GPU}.{name}" for name in names.split())
