# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tables of what the emulator computes, checks and refuses, and of the chips that it emulates."""

import json
from collections import Counter
from functools import cache

import environment
from generated_docs import strictness
from generated_docs.markdown import table


def sums() -> str:
    """Numbers of CANN's names that are computed, bookkeeping or refused, by category."""
    return _coverage().partition("\n\n")[0]


def names() -> str:
    """The names that are computed or bookkeeping, by the source file that has them, and those that
    refuse."""
    from ascend_emulator import coverage

    there = _coverage().partition("\n\n")[2].strip()
    refuses = ", ".join(
        point.name for point in coverage.entry_points() if point.asked and point.state == "refuses"
    )
    return f"{there}\n\n### Refused\n\n{refuses}"


@cache
def _coverage() -> str:
    from ascend_emulator import build, coverage

    try:
        return coverage.report(markdown=True)
    except (build.BuildError, OSError) as error:
        raise LookupError(f"the emulator is not built ({error})") from error


def chips() -> str:
    """The chips that can be emulated."""
    from ascend_emulator.chips import chips

    rows = [
        [
            f"`{name}`",
            f"{chip.memory >> 30} GiB",
            str(chip.cube_cores),
            str(chip.vector_cores),
            "yes" if chip.bfloat16 else "no",
            str(len(chip.lacks)),
            "yes" if chip.correlated else "no",
        ]
        for name, chip in chips().items()
    ]
    header = [
        "chip",
        "memory",
        "cube cores",
        "vector cores",
        "bfloat16",
        "operators it lacks",
        "correlated",
    ]
    return table(header, rows)


def refused_programs() -> str:
    """Programs that the emulator refuses, as NPUs do."""

    return table(
        ["program", "what it does", "documented", "seen on hardware"], strictness.programs()
    )


def operator_checks() -> str:
    """Checks of operators' arguments, by source file."""
    from ascend_emulator import build

    try:
        rows = strictness.operators()
    except (build.BuildError, OSError) as error:
        raise LookupError(f"the emulator is not built ({error})") from error
    return table(
        ["source", "operators", "dtype rule", "hardware verdict", "checks", "rules from"], rows
    )


def reports() -> str:
    """Reports of NPUs and of the emulator, and how each compares with the emulator's."""
    from ascend_emulator.verify import diff, report

    folder = environment.ROOT / "reports"
    found = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    own = next(each for each in found.values() if report.environment(each)["emulated"])
    rows = []
    for path, each in found.items():
        facts, compared = report.environment(each), diff.compare(own, each)
        outcomes = Counter(
            record["outcome"]
            for name in ("operators", "refusals")
            for record in each["cases"].get(name, {}).values()
        )
        figures = [f"{outcomes[name]}" for name in ("computed", "accepted", "refused")]
        agree = (
            ""
            if each is own
            else f"{compared.agreements} / {len(compared.rounding)} / {len(compared.disagreements)}"
        )
        kind = "emulator" if facts["emulated"] else "NPU"
        versions = [facts["soc"], kind, *(facts[name] for name in ("cann", "driver", "torch_npu"))]
        rows.append([f"`{path.relative_to(folder)}`", *versions, *figures, agree])
    head = [
        "report",
        "chip",
        "of",
        "CANN",
        "driver",
        "torch_npu",
        "computed",
        "accepted",
        "refused",
    ]
    return table([*head, "agree / rounding / disagree with the emulator"], rows)
