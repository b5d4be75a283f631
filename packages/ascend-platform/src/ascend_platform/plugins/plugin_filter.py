# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""VLLM_PLUGINS, vLLM's list of the plugins that may load."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ascend_platform.errors import Problem, did_you_mean
from ascend_platform.plugins import COMPONENTS, installed

VARIABLE = "VLLM_PLUGINS"


@dataclass(frozen=True)
class PluginFilter:
    """A value of VLLM_PLUGINS as vLLM reads it (``vllm/plugins/__init__.py``): split at commas and
    not trimmed.

    ``value`` is None where the variable is not set, which lets all plugins load.
    """

    value: str | None

    @classmethod
    def current(cls) -> PluginFilter:
        """The filter of this process."""
        return cls(os.environ.get(VARIABLE))

    @property
    def names(self) -> list[str]:
        """The listed names, trimmed."""
        return [name for word in (self.value or "").split(",") if (name := word.strip())]

    def allows(self, name: str) -> bool:
        """Whether vLLM loads a plugin of this name."""
        return self.value is None or name in self.value.split(",")

    def has_space_beside(self, name: str) -> bool:
        """Whether a name is filtered out because of a space beside it."""
        return not self.allows(name) and name in self.names

    def fix_to_allow(self, *names: str) -> str:
        """The command after which these plugins load as well, with misspelled names corrected."""
        return _export([*self.corrected(installed.names()), *names])

    def problem(self, known: Collection[str]) -> tuple[Problem, bool] | None:
        """The error in the value, and whether it prevents the platform from loading.

        Args:
            known: names of all installed plugins of vLLM.
        """
        if self.value is None:
            return None
        platform, names = COMPONENTS["ascend-platform"], self.names
        is_off, fix = not self.allows(platform), _export(self.corrected(known))
        if not names:
            return Problem(f"{self.value!r} lets no plugin load", f"unset {VARIABLE}"), True
        if any(word != word.strip() for word in self.value.split(",")):
            found = f"{self.value!r} has spaces, which vLLM takes as part of the names"
            return Problem(found, fix), is_off
        if unknown := [name for name in names if name not in known]:
            return Problem(f"no plugin has the name {', '.join(unknown)}", fix), is_off
        found = f"{self.value!r} leaves out {platform}, without which vLLM finds no NPU"
        return (Problem(found, fix), True) if is_off else None

    def corrected(self, known: Collection[str]) -> list[str]:
        """The platform's name and the listed ones, each unknown one replaced by the nearest known
        one, or left out if there is none."""
        near = (
            name if name in known else did_you_mean(name, known, cutoff=0.8) for name in self.names
        )
        return [COMPONENTS["ascend-platform"], *near]


def allowed(entry_point: str) -> bool:
    """Whether VLLM_PLUGINS lets an entry point of this name load, as vLLM reads it
    (``vllm/plugins/__init__.py``)."""
    return PluginFilter.current().allows(entry_point)


def _export(names: Iterable[str]) -> str:
    return f"export {VARIABLE}={','.join(dict.fromkeys(filter(None, names)))}"
