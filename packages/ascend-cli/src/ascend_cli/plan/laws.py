# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Laws of an estimate: those of operators and collectives, with the constants of ``laws.toml``, and
of the host by its stack.

``tools/published/fit.py`` fits the constants on public rows, and docs/modelled-times.md shows the
error of each law. The operators' rows are one profile of Atlas A3 (vllm-ascend 0.15, CANN 8.5);
for another chip the fractions of its published figures are assumed to be the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_cli.figures import ANNOUNCED, PROFILED, ChipFigures
from ascend_cli.plan.law import CollectiveLaw, Law, collectives, operators

_TABLE = tomllib.loads(Path(__file__).with_name("laws.toml").read_text())
LAWS: Mapping[str, Law] = operators(_TABLE)
"""By operator."""
COLLECTIVE, EXPERTS = (collectives(_TABLE)[name] for name in ("collective", "experts"))
"""Of a collective, and of the dispatch or combine of tokens between NPUs with experts."""


@dataclass(frozen=True)
class HostLaw:
    """Modelled time of the host for a step, in milliseconds; the device's overlaps with it.

    Attributes:
        step_ms: of a decode step in a graph.
        layer_ms: of a decode step in a graph, for each layer.
        eager_ms: of a step without a graph, as of a prefill, for each layer.
        origin: report whose times these are; empty: see ``HOST_ORIGINS``.
        layers_origin: report of the times for each layer; empty: those of the regime.
    """

    step_ms: float
    layer_ms: float
    eager_ms: float
    origin: str = ""
    layers_origin: str = ""

    def graph(self, layers: int) -> float:
        """Seconds of a decode step in a graph."""
        return (self.step_ms + self.layer_ms * layers) / 1e3

    def eager(self, layers: int) -> float:
        """Seconds of a step without a graph."""
        return self.eager_ms * layers / 1e3


HOSTS: Mapping[str, HostLaw] = {
    "tuned": HostLaw(4.0, 0.0, 4.15),
    "typical": HostLaw(55.0, 0.0, 4.15),
}
HOST_ORIGINS = {
    "tuned": "assumed",
    "typical": "fitted on public rows of vllm-ascend 0.13 to 0.20, models of 40 to 94 layers",
}
BANDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "tuned": {
        "first_ms": (0.85, 1.59),
        "token_ms": (0.72, 1.2),
        "tokens_per_second": (0.63, 1.17),
    },
    "typical": {
        "first_ms": (1.11, 3.03),
        "token_ms": (0.71, 1.28),
        "tokens_per_second": (0.44, 1.27),
    },
}
"""Published / modelled of the rows of a regime at quantiles of 10 and 90 %, by laws fitted without
the rows of the same model (docs/modelled-times.md)."""


@dataclass(frozen=True)
class Laws:
    """All laws of an estimate.

    Attributes:
        operators: laws of the device's operators.
        collective: law of collectives.
        experts: law of the exchange of tokens with experts.
        hosts: of the host, by regime.
        accepted: fraction of draft tokens that are accepted, each after the one before it.
    """

    operators: Mapping[str, Law]
    collective: CollectiveLaw
    experts: CollectiveLaw
    hosts: Mapping[str, HostLaw]
    accepted: float = 0.46

    def origins(self, chip: ChipFigures) -> dict[str, str]:
        """Where the times of the device and of each regime's host come from."""
        fitted = f"fitted on public rows of {PROFILED}"
        if chip.name != PROFILED:
            fitted += f" and assumed for {chip.name}"
        if chip.name in ANNOUNCED:
            fitted += ", whose figures are announced, not measured"
        reports: dict[str, list[str]] = {}
        for name, law in [*self.operators.items(), ("collectives", self.collective)]:
            if law.origin:
                reports.setdefault(law.origin, []).append(name)
        parts = [f"{', '.join(names)} measured ({file})" for file, names in reports.items()]
        found = {"device": "; ".join([*parts, f"{'others ' if parts else ''}{fitted}"])}
        for regime, host in self.hosts.items():
            source = f"measured ({host.origin})" if host.origin else HOST_ORIGINS[regime]
            found[f"{regime} host"] = f"{host.step_ms:.0f} ms a step in a graph, {source}"
            if host.layers_origin:
                found[f"{regime} host"] += (
                    f"; {host.layer_ms * 1e3:.3g} us a layer in a graph and {host.eager_ms:.3g} ms"
                    f" without, measured ({host.layers_origin})"
                )
        return found


FITTED = Laws(LAWS, COLLECTIVE, EXPERTS, HOSTS)
