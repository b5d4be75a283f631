# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rows of the tables of overrides, and the tables."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_platform import fingerprint

TABLES = ("common", "states", "v1", "v2")
"""The modules with tables; V1's is absent once its runner is no longer supported."""


@dataclass(frozen=True)
class Override:
    """One name of vLLM.

    Attributes:
        target: ``package.module:qualified.name`` of the definition, or of the module's own
        ``torch``.
        action: what is done to it: ``replaced``, ``entries added``, ``kernel registered``,
        ``operator defined`` or ``used``.
        why: what fails on the NPU without it.
        remove_when: the condition under which the entry can be deleted.
        sources: fingerprints of the source that it was written for, by the first minor version of
        vLLM that has that source.
        compared: the target whose source is compared, where it is not ``target`` itself.
        replaced_in: the modules whose name is replaced, if it is not only the defining module.
        kept_in: modules, or packages, that import the name with ``from … import`` and keep vLLM's
        own.
    """

    target: str
    action: str
    why: str
    remove_when: str
    sources: Mapping[str, str]
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
        fields = {
            "name": self.name,
            "target": self.target,
            "action": self.action,
            "vllm": ", ".join(self.sources),
        }
        return fields | {
            "why": self.why,
            "remove_when": self.remove_when,
            "problem": self.problem(tree),
        }

    def problem(self, tree: Path | None = None) -> str:
        """The difference between a vLLM (of a source tree, or the installed one) and the supported
        ones; "" if there is none."""
        module, _, qualname = self.target.partition(":")
        source = fingerprint.module_source(module, tree)
        compared = self.compared or self.target
        found = source is not None and (
            compared.endswith(".*") or fingerprint.fingerprint(source, qualname)
        )
        if not found:
            return fingerprint.drift(self.target, (), source)
        source = fingerprint.module_source(compared.partition(":")[0], tree)
        return fingerprint.drift(compared, self.sources.values(), source)


def torch_view(module: str, why: str, fingerprint: str, since: str = "0.31") -> Override:
    """A module whose ``torch.cuda`` becomes ``torch.npu``, without a change to ``torch`` itself."""
    remove_when = "the module uses torch.accelerator instead of torch.cuda"
    return Override(
        f"{module}:torch",
        "replaced",
        why,
        remove_when,
        {since: fingerprint},
        compared=f"{module}:torch.cuda.*",
    )


def kernel(target: str, why: str, sources: Mapping[str, str]) -> Override:
    """A Triton kernel with a PyTorch implementation that takes its arguments, through vLLM's
    registry of kernels."""
    return Override(target, "kernel registered", why, "Triton runs on the NPU", sources)


@functools.cache
def tables() -> dict[str, tuple[Override, ...]]:
    """The rows of each table."""
    modules = {name: f"{__package__}.{name}" for name in TABLES}
    return {
        name: importlib.import_module(module).OVERRIDES
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }


def rows(*names: str) -> list[Override]:
    """The rows of these tables, as far as they are present, or of all."""
    return [each for name in names or TABLES for each in tables().get(name, ())]
