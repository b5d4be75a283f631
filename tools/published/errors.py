# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Errors of modelled times: modelled / published of the rows of each class.

``limits.json`` has the errors that a change may not make worse; ``tests/project`` compares them.
After better laws or more rows, ``python -m published.errors`` in tools/ rewrites it.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ascend_cli.plan import laws
from published import figures, fit
from published.figures import Row

LIMITS = figures.DATA / "limits.json"
VECTORS = (
    *("norm", "activation", "quantize", "static quantize", "rope", "scatter"),
    *("transpose", "routing", "elementwise"),
)


@dataclass(frozen=True)
class Errors:
    """Ratios of modelled to published values."""

    ratios: tuple[float, ...]

    @property
    def bias(self) -> float:
        return math.exp(statistics.fmean(map(math.log, self.ratios)))

    @property
    def median(self) -> float:
        """Median error, as a factor of at least 1."""
        return math.exp(statistics.median(abs(math.log(ratio)) for ratio in self.ratios))

    @property
    def within(self) -> float:
        """Part of the rows between 0.8 and 1.25."""
        return sum(0.8 <= ratio <= 1.25 for ratio in self.ratios) / len(self.ratios)

    def quantiles(self) -> tuple[float, float]:
        return figures.quantile(self.ratios, 0.1), figures.quantile(self.ratios, 0.9)

    def record(self) -> dict[str, float]:
        low, high = self.quantiles()
        values = {"bias": self.bias, "low": low, "high": high, "within": self.within}
        return {"rows": len(self.ratios)} | {
            name: round(value, 3) for name, value in values.items()
        }


def _is(regime: str, metric: str, *software: str) -> Callable[[Row], bool]:
    return lambda row: (
        row.origin["regime"] == regime
        and row.metric == metric
        and row.origin["software"].startswith(software)
    )


def _graphs(row: Row) -> bool:
    old = row.origin["software"].startswith(("vllm-ascend 0.7", "vllm-ascend 0.9"))
    return _is("typical", "token_ms", "vllm-ascend")(row) and row.plain and not old


SERVING: Mapping[str, Callable[[Row], bool]] = {
    "tuned: tokens/s, nightly tests of vllm-ascend": _is(
        "tuned", "tokens_per_second", "vllm-ascend main"
    ),
    "of these without drafts": lambda row: (
        row.plain and _is("tuned", "tokens_per_second", "vllm-ascend main")(row)
    ),
    "tuned: time per output token, SGLang": _is("tuned", "token_ms", "SGLang"),
    "tuned: decode step, profiles": _is("tuned", "step_ms", "vllm-ascend"),
    "typical: time per output token, vllm-ascend with graphs": _graphs,
    "of these with a stated family of chips": lambda row: (
        _graphs(row) and row.source != "issue 4656"
    ),
    "typical: time per output token, vllm-ascend without graphs or before 0.10": lambda row: (
        _is("typical", "token_ms", "vllm-ascend")(row) and not _graphs(row)
    ),
    "typical: tokens/s, vllm-ascend": _is("typical", "tokens_per_second", "vllm-ascend"),
    "typical: time to the first token, vllm-ascend": _is("typical", "first_ms", "vllm-ascend"),
    "typical: time per output token, MindIE": _is("typical", "token_ms", "MindIE"),
    "typical: tokens/s, MindIE": _is("typical", "tokens_per_second", "MindIE"),
    "typical: time to the first token, MindIE": _is("typical", "first_ms", "MindIE"),
}
"""Classes of serving.csv."""
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "matmuls, 16 bits": ("matmul",),
    "matmuls, int8": ("matmul int8",),
    "attention": ("attention", "latent attention", "prefill attention"),
    "vector operators": VECTORS,
    "sampling": ("sampling", "sort", "argmax", "softmax", "top-k"),
    "collectives": ("collective",),
    "dispatch and combine": ("experts",),
}
"""Classes of kernels.csv and collectives.csv, with their laws."""


def of(rows: Iterable[Row]) -> Errors:
    """By laws fitted without the rows of each row's model."""
    return Errors(tuple(fit.left_out(row) / row.value for row in rows))


def serving(name: str) -> list[Row]:
    return [row for row in figures.rows() if SERVING[name](row)]


def operators(name: str) -> list[tuple[figures.Launch, float]]:
    """Launches of a class and modelled / published."""
    seen = [one for one in figures.launches() if one.law in OPERATORS[name]]
    return [(one, one.by(fit.law(one.law)) / one.seconds) for one in seen]


def left_out(name: str, whole_model: bool = False) -> list[tuple[figures.Launch, float]]:
    """Launches of a class and modelled / published, each by laws fitted without it, or without the
    rows of its model; only those with other rows for each constant of their law, and none where
    these are fewer than three."""
    found = []
    for one, _ in operators(name):
        gone = [
            each
            for each in figures.launches()
            if each is one or (whole_model and each.model == one.model)
        ]
        others = {each.law for each in figures.launches() if each not in gone}
        known = {fit.constant(law, field) for law in others for field in fit.FIELDS[law]}
        if known >= {fit.constant(one.law, field) for field in fit.FIELDS[one.law]}:
            found.append((one, one.by(fit.law(one.law, gone)) / one.seconds))
    return found if len(found) > 2 else []


def bands() -> dict[str, dict[str, tuple[float, float]]]:
    """``BANDS`` of laws.py. A metric without rows has the quantiles of its regime's tokens/s."""
    names = {
        ("tuned", "token_ms"): ("tuned: time per output token, SGLang",),
        ("tuned", "tokens_per_second"): ("tuned: tokens/s, nightly tests of vllm-ascend",),
        ("typical", "token_ms"): ("typical: time per output token, vllm-ascend with graphs",),
        ("typical", "tokens_per_second"): ("typical: tokens/s, vllm-ascend",),
        ("typical", "first_ms"): ("typical: time to the first token, vllm-ascend",),
    }
    found: dict[str, dict[str, tuple[float, float]]] = {regime: {} for regime in laws.HOSTS}
    for (regime, metric), classes in names.items():
        low, high = of(row for name in classes for row in serving(name)).quantiles()
        found[regime][metric] = round(1 / high, 2), round(1 / low, 2)
    low, high = found["tuned"]["tokens_per_second"]
    found["tuned"]["first_ms"] = round(1 / high, 2), round(1 / low, 2)
    return found


def records() -> dict[str, dict[str, float]]:
    """The errors of every class."""
    found = {name: of(serving(name)).record() for name in SERVING}
    for name in OPERATORS:
        found[name] = Errors(tuple(ratio for _, ratio in operators(name))).record()
    return found


def worse(
    now: Mapping[str, Mapping[str, float]], limits: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Classes whose bias or quantiles are worse than these limits, or that have fewer rows."""
    found = []
    for name, limit in limits.items():
        one = now[name]
        farther = [
            key
            for key in ("bias", "low", "high")
            if abs(math.log(one[key])) > abs(math.log(limit[key])) + 0.02
        ]
        if one["rows"] < limit["rows"] or one["within"] < limit["within"]:
            farther.append("rows")
        if farther:
            found.append(f"{name}: {', '.join(farther)}: {dict(one)}, limit {dict(limit)}")
    return found


if __name__ == "__main__":
    LIMITS.write_text(json.dumps(records(), indent=1) + "\n")
    print(bands())
