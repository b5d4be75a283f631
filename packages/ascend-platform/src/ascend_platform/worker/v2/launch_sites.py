# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Where vLLM's V2 runner launches Triton kernels (``launch_sites.csv``): who serves each, or why it
is never reached.

``state`` is ``overridden`` by a function of this package, ``refused`` with a feature of
``config/model_runner.py``, or ``unreachable`` for the reason given. Fingerprints are of the kernel
and of the function that launches it.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from ascend_platform import fingerprint
from ascend_platform.worker.v2 import overrides

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

    def differences(self, tree: Path | None = None) -> Iterator[str]:
        """Differences of a vLLM (a source tree, or the installed one) from the table."""
        for name, kept in ((self.kernel, self.kernel_source), (self.caller, self.caller_source)):
            module, _, qualname = name.rpartition(":")
            module = module or f"{GPU}.{self.module}"
            source = fingerprint.module_source(module, tree)
            if difference := fingerprint.drift(f"{module}:{qualname}", (kept,), source):
                yield difference


def sites() -> list[Site]:
    with open(Path(__file__).with_suffix(".csv"), newline="") as file:
        return [Site(**row) for row in csv.DictReader(file)]


def kernels_of(feature: str) -> list[str]:
    """The kernels that a refused feature needs."""
    return [site.kernel.rpartition(":")[2] for site in sites() if site.by == feature]


def rows(tree: Path | None, version: str) -> list[dict[str, str]]:
    """The overrides for the V2 runner, and all launches, compared with a vLLM; none for one whose
    V2 runner is not supported.

    See ``extension.overrides``.
    """
    if not version or Version(version).release < Version(overrides.SINCE).release:
        return []
    found = [each.row(tree) for each in overrides.OVERRIDES]
    for site in sites():
        fields = {
            "name": f"{site.module}.{site.kernel.rpartition(':')[2]}",
            "target": f"{GPU}.{site.module}:{site.caller}",
        }
        fields |= {"action": f"launch {site.state}", "vllm": overrides.SINCE, "why": site.by}
        found.append(
            fields
            | {
                "remove_when": "Triton runs on the NPU",
                "problem": "; ".join(site.differences(tree)),
            }
        )
    return found


def difference() -> str:
    """The first difference between the installed vLLM's kernels that are overridden and those of
    the table; "" if none."""
    found = (each for site in sites() if site.state == "overridden" for each in site.differences())
    first = next(found, "")
    fingerprint.parsed.cache_clear()
    return first
