# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Where vLLM's V2 runner launches Triton kernels (``launch_sites.csv``): who serves each, or why it
is never reached.

``state`` is ``overridden`` by a function of ``kernels/v2``, ``refused`` with a feature of
``config/model_runner.py``, or ``unreachable`` for the reason given. Fingerprints are of the kernel
and of the function that launches it; each is in the first row that has the name only.

A row in which the function ``replaces`` the caller or the kernel is an override: ``why`` says what
it computes, ``imported_by`` and ``kept_in`` name the modules that import the caller and get the
function or keep vLLM's. Other overridden launches are within what another row replaces.
"""

import csv
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ascend_platform import fingerprint

SINCE = "0.33"
"""The first minor version of vLLM whose V2 runner is supported."""

GPU = "vllm.v1.worker.gpu"


class Site(NamedTuple):
    """One launch. ``kernel`` has the form ``package.module:name`` where another module
    defines it."""

    module: str
    kernel: str
    caller: str
    kernel_source: str
    caller_source: str
    state: str
    by: str
    replaces: str
    why: str
    imported_by: str
    kept_in: str

    @property
    def targets(self) -> tuple[str, str]:
        """The kernel and its caller, as ``package.module:qualified.name``."""
        kernel = self.kernel if ":" in self.kernel else f"{GPU}.{self.module}:{self.kernel}"
        return kernel, f"{GPU}.{self.module}:{self.caller}"

    def row(self, tree: Path | None = None) -> dict[str, str]:
        """A row of the table of overrides; see ``extension.overrides``."""
        return {
            "name": f"{self.module}.{self.kernel.rpartition(':')[2]}",
            "target": self.targets[1],
            "action": f"launch {self.state}",
            "vllm": SINCE,
            "why": self.by,
            "remove_when": "Triton runs on the NPU",
            "problem": "; ".join(self.differences(tree)),
        }

    def differences(self, tree: Path | None = None) -> Iterator[str]:
        """Differences of a vLLM (a source tree, or the installed one) from the table."""
        for target in self.targets:
            source = fingerprint.module_source(target.partition(":")[0], tree)
            if difference := fingerprint.drift(target, (sources()[target],), source):
                yield difference


@functools.cache
def sites() -> list[Site]:
    with open(Path(__file__).with_suffix(".csv"), newline="") as file:
        return [Site(**row) for row in csv.DictReader(file)]


@functools.cache
def sources() -> dict[str, str]:
    """The fingerprint of each kernel and caller, which the first row that has it gives."""
    found: dict[str, str] = {}
    for site in sites():
        for target, source in zip(
            site.targets, (site.kernel_source, site.caller_source), strict=True
        ):
            found.setdefault(target, source)
    return found


def kernels_of(feature: str) -> list[str]:
    """The kernels that a refused feature needs."""
    return [site.kernel.rpartition(":")[2] for site in sites() if site.by == feature]


def difference() -> str:
    """The first difference between the installed vLLM's kernels that are overridden and those of
    the table; "" if none."""
    found = (each for site in sites() if site.state == "overridden" for each in site.differences())
    first = next(found, "")
    fingerprint.parsed.cache_clear()
    return first
