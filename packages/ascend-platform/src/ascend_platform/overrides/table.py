# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rows of the tables of overrides, and the tables: a TOML file each, in this folder or in that of
its subject. The V2 runner has a second one for the launches of Triton kernels. Other wheels have
tables of their own."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from ascend_platform import fingerprint
from ascend_platform.logger import logger
from ascend_platform.plugins import requirements
from ascend_platform.plugins.plugin_filter import PluginFilter

TABLES = ("common", "states", "v1", "v2")
"""The tables of ascend-platform; that of V1 is absent once its runner is no longer supported."""

GROUP = "vllm_ascend.overrides"
"""Entry points of this group name a package with the file ``overrides.toml``, the table of another
wheel, which has the entry point's name. VLLM_PLUGINS filters them by that name."""

V2_SINCE = "0.33"
"""The first minor version of vLLM whose V2 runner is supported."""

OF_LAUNCHES = {"contained": "overridden", "refused": "refused", "unreachable": "unreachable"}
"""Actions of rows that only record a launch, and the states of these launches."""


class Launch(NamedTuple):
    """One launch of a Triton kernel in vLLM's V2 runner.

    Attributes:
        kernel: its target, as ``package.module:name``.
        caller: the target of the function that launches it.
        state: ``overridden``, ``refused`` or ``unreachable``.
        by: the replacement below ``ascend_platform``, the refused feature, or why no engine reaches
            the launch.
    """

    kernel: str
    caller: str
    state: str
    by: str


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
        by: the replacement, or what is added, as ``module:name`` below ``package``; "" where code
            decides it.
        action: what is done to it: ``replaced``, ``entries added``, ``kernel registered``,
            ``operator defined`` or ``used``. Of functions that launch Triton kernels also
            ``contained`` (in a name that another row replaces), ``refused`` (with a feature) or
            ``unreachable``.
        compared: the target whose source is compared, where it is not ``target`` itself.
        replaced_in: the modules whose name is replaced, if it is not only the defining module.
        kept_in: modules, or packages, that import the name with ``from … import`` and keep vLLM's
            own.
        kernels: the Triton kernels that the function launches, with their fingerprints, which are
            compared too. A name without a module is of the target's module.
        callers: the functions that launch the kernel, with their fingerprints, likewise.
        feature: the feature that is refused because it needs the kernels; see ``config/features.py``.
        package: the package that has the row.
        scope: the processes in which it is applied, of ascend-patches' ``SCOPES``; "" is wherever
            the code that needs it is imported.
        optional: whether an engine starts without it, where vLLM's source is not the supported one
            or the user leaves it out. ascend-patches applies these rows.
        vllm: the versions of vLLM that an optional row is for, a PEP 440 specifier; "" is all.
        upstream: a reference, for the ledger.

    Raises:
        ValueError: a target without a module or a name.
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
    kernels: Mapping[str, str] = field(default_factory=dict)
    callers: Mapping[str, str] = field(default_factory=dict)
    feature: str = ""
    package: str = "ascend_platform"
    scope: str = ""
    optional: bool = False
    vllm: str = ""
    upstream: str = ""

    def __post_init__(self) -> None:
        if not (self.module and self.qualname):
            raise ValueError(f"target {self.target!r} is not package.module:qualified.name")

    @property
    def name(self) -> str:
        """By which users name the row: of an optional one, that of its replacement."""
        if self.optional:
            return self.by.removeprefix("patch_").replace(":", ".")
        return f"{self.module.rpartition('.')[2]}.{self.qualname}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    @property
    def distribution(self) -> str:
        """The wheel that has the row."""
        return self.package.partition(".")[0].replace("_", "-")

    @property
    def is_needed(self) -> bool:
        """Whether an engine needs vLLM's source to be the supported one."""
        return self.action not in ("refused", "unreachable")

    def is_for(self, version: str) -> bool:
        """Whether a vLLM of this version can have the source: the first that has is not later. One
        of an unknown version, such as "" or that of a wrong VLLM_VERSION, can."""
        since = min((Version(minor) for minor in self.sources), default=Version("0"))
        with contextlib.suppress(InvalidVersion):
            return Version(version).release >= since.release
        return True

    @property
    def launches(self) -> list[Launch]:
        """The launches that the row is about."""
        state = OF_LAUNCHES.get(self.action, "overridden")
        by = self.by or self.feature or self.why
        pairs = [(kernel, self.target) for kernel in self.kernels]
        pairs += [(self.target, caller) for caller in self.callers]
        return [Launch(kernel, caller, state, by) for kernel, caller in pairs]

    def row(self, tree: Path | None = None) -> dict[str, str]:
        """A row of the table of overrides; see ``extension.overrides``."""
        named = {name: getattr(self, name) for name in ("name", "target")}
        named["action"] = f"launch {self.action}" if self.action in OF_LAUNCHES else self.action
        why = self.why or self.feature or self.by
        reasons = {"why": why, "remove_when": self.remove_when}
        problem = self.problem(tree)
        upgrade = requirements.upgrade_command(self.distribution)
        upgrade += ", or install an unedited release of vLLM"
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
        return fingerprint.drift(compared, self.sources.values(), source) or next(
            self._changed_launches(tree), ""
        )

    def _changed_launches(self, tree: Path | None) -> Iterator[str]:
        for target, supported in {**self.kernels, **self.callers}.items():
            source = fingerprint.module_source(target.partition(":")[0], tree)
            if difference := fingerprint.drift(target, [supported], source):
                yield difference


def files(name: str) -> list[Path]:
    """The TOML files of a table, first the one that describes it. Those of a subject are in its
    folder."""
    here, root = Path(__file__).parent, Path(__file__).parents[1]
    folder = root / ("state_layers" if name == "states" else f"runners/{name}")
    named = (here / f"{name}.toml", folder / "overrides.toml", folder / "launches.toml")
    return [file for file in named if file.is_file()]


@functools.cache
def tables() -> dict[str, tuple[Override, ...]]:
    """The rows of each table of ascend-platform."""
    found = {}
    for name in TABLES:
        if rows := [row for file in files(name) for row in read(file)]:
            found[name] = tuple(rows)
    return found


def of_wheels() -> dict[str, tuple[Override, ...]]:
    """The rows of other wheels' tables that VLLM_PLUGINS allows. A table that cannot be read is
    logged."""
    return _of_wheels(PluginFilter.current())


@functools.cache
def _of_wheels(plugins: PluginFilter) -> dict[str, tuple[Override, ...]]:
    points = importlib.metadata.entry_points(group=GROUP)
    return {each.name: _of_package(each.value) for each in points if plugins.allows(each.name)}


@functools.cache
def _of_package(package: str) -> tuple[Override, ...]:
    try:
        if (module := fingerprint.locate(package)) is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return tuple(read(module.parent / "overrides.toml", package))
    except Exception as error:
        logger.warning("overrides of %s disabled: %s: %s", package, type(error).__name__, error)
        return ()


def rows(*names: str) -> list[Override]:
    """The rows of these tables, as far as they are present, or all that an engine needs."""
    if names:
        present = tables() | {name: rows for name, rows in of_wheels().items() if name in names}
        return [each for name in names for each in present.get(name, ())]
    every = [*tables().values(), *of_wheels().values()]
    return [each for rows in every for each in rows if not each.optional]


def of_modules(name: str, *modules: str) -> list[Override]:
    """The rows of a table whose replacement is in one of these modules, below the table's package;
    all without modules."""
    found = rows(name)
    return [each for each in found if not modules or each.by.partition(":")[0] in modules]


def optional_rows() -> list[Override]:
    """The rows that an engine can do without, by package and order in their tables."""
    return [each for rows in of_wheels().values() for each in rows if each.optional]


def launches() -> list[Launch]:
    """Every launch of a Triton kernel in vLLM's V2 runner."""
    return [launch for row in rows("v2") for launch in row.launches]


def kernels_of(feature: str) -> list[str]:
    """The names of the kernels that a refused feature needs."""
    found = [launch for row in rows("v2") if row.feature == feature for launch in row.launches]
    return [launch.kernel.partition(":")[2] for launch in found]


def read(file: Path, package: str = "ascend_platform") -> Iterator[Override]:
    """The rows of a file. What stands above them applies to each that has no such field."""
    content = tomllib.loads(file.read_text())
    rows, _ = content.pop("override"), content.pop("about", "")
    for row in rows:
        yield _override({"package": package} | content | row)


def _override(row: dict[str, Any]) -> Override:
    """A row of a TOML file, with full names."""
    module = row["target"].partition(":")[0]
    lists: dict[str, Any] = {name: tuple(row.pop(name, ())) for name in ("replaced_in", "kept_in")}
    sources: dict[str, Any] = {
        name: {
            target if ":" in target else f"{module}:{target}": source
            for target, source in row.pop(name, {}).items()
        }
        for name in ("kernels", "callers")
    }
    return Override(**row, **lists, **sources)
