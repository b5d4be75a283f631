# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tables of docs/modelled-times.md: errors of modelled times on published figures."""

import math
from collections import defaultdict

from generated_docs.markdown import table
from published import errors, figures, fit

METRICS = {
    "first_ms": "ms to the first token",
    "token_ms": "ms per output token",
    "step_ms": "ms of a decode step",
    "tokens_per_second": "tokens/s",
}
WORST = 3
"""Rows of each class that are shown."""


def _columns(found: errors.Errors) -> list[str]:
    low, high = found.quantiles()
    return [
        f"{found.bias:.2f}",
        f"{found.median - 1:.0%}",
        f"{low:.2f} to {high:.2f}",
        f"{found.within:.0%}",
    ]


def _errors(rows: list[figures.Row]) -> list[str]:
    before = errors.Errors(tuple(row.previous / row.value for row in rows))
    now = errors.of(rows)
    pairs = zip(_columns(before), _columns(now), strict=True)
    return [str(len(rows)), *(f"{old} → {new}" for old, new in pairs)]


HEAD = ("rows", "bias", "median error", "10 to 90 %", "within ±25 %")


def classes() -> str:
    """Errors of each class of serving figures, before and after."""
    rows = [[name, *_errors(errors.serving(name))] for name in errors.SERVING]
    return table(["class", *HEAD], rows)


def software() -> str:
    """Errors by chip, software and regime."""
    groups: dict[tuple[str, ...], list[figures.Row]] = defaultdict(list)
    for row in figures.rows():
        key = (row.chip, row.origin["software"], row.origin["regime"], METRICS[row.metric])
        groups[key].append(row)
    rows = [[*key, *_errors(group)] for key, group in sorted(groups.items())]
    return table(["chip", "software", "regime", "metric", *HEAD], rows)


def _row(row: figures.Row) -> list[str]:
    modelled, layout, load = fit.left_out(row), row.layout, row.load
    sizes = f"TP{layout.tensor}" + (f" DP{layout.data}" if layout.data > 1 else "")
    words = [
        sizes + (" EP" if layout.expert else ""),
        "" if load.quantization == "none" else load.quantization.upper(),
        f"{load.drafts} drafts" if load.drafts else "",
        "eager" if load.eager else "",
    ]
    return [
        f"[{row.origin['software']}]({row.origin['url']})",
        f"{row.model} on {row.chip}",
        ", ".join(word for word in words if word),
        f"{load.requests}: {load.input} / {load.output}",
        METRICS[row.metric],
        f"{row.value:.4g}",
        f"{modelled:.4g}",
        f"{row.previous / row.value:.2f} → {modelled / row.value:.2f}",
    ]


ROW = ("source", "model", "layout", "requests: tokens", "metric", "published", "modelled", "ratio")


def worst() -> str:
    """The worst rows of each class."""
    rows = []
    for name in errors.SERVING:
        ordered = sorted(
            errors.serving(name),
            key=lambda row: (-abs(math.log(fit.left_out(row) / row.value)), row.source),
        )
        rows += [[name, *_row(row)] for row in ordered[:WORST]]
    return table(["class", *ROW], rows)


def withheld() -> str:
    """Rows that no fit saw."""
    ordered = sorted(figures.withheld(), key=lambda row: (row.source, row.metric, row.value))
    return table(ROW, [_row(row) for row in ordered])


def _left_out(name: str) -> list[str]:
    """The parts of a class that are within the limits by laws fitted without each row, before and
    after, and without the rows of its model."""
    shown = []
    for whole_model in (False, True):
        found = errors.left_out(name, whole_model)
        if not found:
            shown.append("too few")
            continue
        now = errors.Errors(tuple(ratio for _, ratio in found)).within
        words = f"{now:.0%} of {len(found)}"
        if not whole_model and all(one.previous for one, _ in found):
            before = errors.Errors(tuple(one.previous / one.seconds for one, _ in found))
            words = f"{before.within:.0%} → {words}"
        shown.append(words)
    return shown


def operators() -> str:
    """Errors of operators and collectives, and their worst rows."""
    rows = []
    for name in errors.OPERATORS:
        fitted = errors.operators(name)
        found = errors.Errors(tuple(ratio for _, ratio in fitted))
        bad = sorted(fitted, key=lambda each: -abs(math.log(each[1])))[:WORST]
        worst = "; ".join(f"{one.name}: {ratio:.2f}" for one, ratio in bad)
        rows.append([name, str(len(fitted)), *_columns(found), *_left_out(name), worst])
    columns = ("each row left out", "each model left out", "worst rows, ratio")
    return table(["class", *HEAD, *columns], rows)


def laws() -> str:
    """The constants."""
    from ascend_cli.plan import laws as known

    rows = [
        [name, f"{law.start_us:g}", f"{law.rows_us:g}", f"{law.bandwidth:.0%}", f"{law.rate:.0%}"]
        for name, law in known.LAWS.items()
    ]
    return table(["law", "start, us", "with 256 rows, us more", "of bandwidth", "of rate"], rows)
