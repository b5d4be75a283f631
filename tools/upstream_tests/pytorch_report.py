# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The page of PyTorch's own tests on the emulated NPU (see tools/upstream)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from upstream_tests.pytorch_verdicts import (
    DTYPES,
    FAILS,
    PASSES,
    Verdicts,
    agreement,
    key,
    noise,
    on_cpu,
    pair,
)
from upstream_tests.report import BAD, reason, table
from upstream_tests.run import EXPECTED, IDLE

ON_CPU = "The case fails on the CPU as well: it says nothing about the NPU."
OF_TORCH = (
    "The installed torch expects the case to fail (expectedFailure), for reasons that are not about"
    " the NPU; a failure in the list may be that it succeeds."
)


@dataclass
class Judged:
    """One case: hardware's verdict and the emulator's outcome.

    Attributes:
        listed: the reason that the list gives for a failure.
        apart: why the verdict is not about the NPU, if it is not.
        why: the reason of a difference, if one is known.
    """

    file: str
    case: str
    said: str
    listed: str
    outcome: str
    message: str
    how: str
    apart: str | None
    why: str | None

    @property
    def differs(self) -> bool:
        return not self.apart and self.how in ("too kind", "too strict", "wrong numbers")


TEXTS = (
    "The case compares torch_npu's texts of two calls that are both refused; that of 2.13 begins"
    " with its function and line."
)
TWO_REFUSALS = re.compile(
    r'AssertionError: ".*NPU\\ function\\ error.*" does not match ".*NPU function'
)
NOTHING = "The case puts nothing on the device, such as one whose operator has no samples for it."


def judge(
    ran: dict, control: dict, verdicts: Verdicts, settings: dict, what: str
) -> Iterator[Judged]:
    """Compare results with verdicts: of the sample, or of the pairs of operator and dtype."""
    for file, result in ran.items():
        on_the_cpu = control.get(file, {}).get("cases", {})
        for case, told in result["cases"].items():
            known = key(file, case)
            said = verdicts.of(known) if what == "sample" else verdicts.of_pair(known)
            if told["for"] not in (what, "both") or not said:
                continue
            identifier = f"{file}::{case}"
            how = agreement(said, told["outcome"], told["message"])
            listed = verdicts.disabled.get(known, "")
            apart = noise(identifier, said, listed, settings["noise"])
            if not apart and told["message"].startswith(EXPECTED):
                apart = OF_TORCH
            if not apart and TWO_REFUSALS.match(told["message"]):
                apart = TEXTS
            if not apart and told["message"] == IDLE:
                apart = NOTHING
            if not apart and on_the_cpu.get(on_cpu(case), {}).get("outcome") in BAD:
                apart = ON_CPU
            why = (
                reason(f"{how}/{identifier}", told["message"], settings["explanations"])
                if how != "agrees"
                else None
            )
            yield Judged(
                file, case, said, listed, told["outcome"], told["message"], how, apart, why
            )


def line(message: str) -> str:
    """The emulator's message, or else the first line of the error."""
    own = re.findall(r"\[ascend-emulator\] ([^\n]*)", message)
    return " ".join((own[0] if own else (message.splitlines() or [""])[0]).split())


def rows(cases: Iterable[Judged]) -> Iterator[str]:
    """The differences, tab-separated: verdict, file, case, operator, dtype, the list's reason, the
    emulator's message, reason."""
    for one in cases:
        if one.differs:
            dtype = re.search(rf"_({DTYPES})$", one.case)
            found = pair(key(one.file, one.case)[2])
            named = found or (re.sub("_npu.*|.*::test_", "", one.case), dtype[1] if dtype else "")
            fields = (
                one.how,
                one.file,
                one.case,
                *named,
                one.listed,
                line(one.message),
                one.why or "",
            )
            yield "\t".join(fields)


def markdown(cases: list[Judged], pairs: list[Judged], identity: dict, settings: dict) -> str:
    """The page."""
    sources = settings["sources"]
    test_files, lists, failures = (
        sources["pytorch"],
        sources["npu-verdicts"],
        sources["npu-failures"],
    )
    text = (
        "the text of PyTorch 2.4's test files"
        if identity["older"]
        else f"the test files of PyTorch {test_files['ref']}"
    )
    options = f" --share {identity['share']:g}" if identity["share"] != 1 else ""
    options += " --path pytorch-2.4/test --older" if identity["older"] else ""
    parts = [
        f"""# PyTorch's own tests, against verdicts of real NPUs

Generated by `tools/upstream --suite pytorch`; do not edit. PyTorch's device tests run on an emulated {identity["soc"]}, and each
outcome is compared with that of A3 hardware, by the lists of [Ascend/pytorch]({lists["url"]}) `{lists["ref"][:9]}` and
`{failures["ref"][:9]}`: a case that is disabled or failed there *fails*; one of a file that ran as a whole, in no list, *passes*.

- *agree*: both pass, or both fail.
- *too kind*: hardware fails the case and the emulator passes it.
- *too strict*: hardware passes the case and the emulator fails it, other than by its numbers; *wrong numbers*: by its numbers.
- *set apart*: the verdict is not about the NPU; the reasons are listed [below](#set-apart). *skipped*: the case skips itself.

A sample of the cases in strata (file, verdict and the list's reason), seed {identity["seed"]}, with {text}:

    tools/upstream --suite pytorch --seed {identity["seed"]}{options}

The hardware's torch is a nightly build of 2.15 with the CANN of August 2026; the emulator runs under torch 2.13.
"""
    ]
    parts.append("## Figures\n")
    parts.append(
        table(
            [
                "",
                "judged",
                "agree",
                "too kind",
                "too strict",
                "wrong numbers",
                "set apart",
                "skipped",
            ],
            _figures(cases, pairs),
        )
    )
    parts.append("## By file\n")
    files = list(dict.fromkeys(one.file for one in cases))
    head = [
        "file",
        "both pass",
        "both fail",
        "too kind",
        "too strict",
        "wrong numbers",
        "set apart",
        "skipped",
    ]
    parts.append(
        table(head, [_file(name, [one for one in cases if one.file == name]) for name in files])
    )
    parts.append("## What hardware fails, by the list's reason\n")
    by_reason = defaultdict(list)
    for one in cases:
        if one.said == FAILS and not one.apart and one.how != "skipped":
            by_reason[one.listed or "(none given)"].append(one.how)
    order = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    parts.append(
        table(
            ["reason", "judged", "emulator fails", "emulator passes"],
            [[name, *_counts(hows)] for name, hows in order],
        )
    )
    parts.append(
        "## Pairs of operator and dtype\n\nOne case of test_meta for each pair on whose three"
        " variants the verdicts agree.\n"
    )
    parts.append(
        table(
            ["dtype", "hardware takes", "emulator refuses", "hardware refuses", "emulator takes"],
            _dtypes(pairs),
        )
    )
    parts.append("## Set apart\n")
    apart = Counter((one.apart, one.how) for one in cases if one.apart)
    for why in dict.fromkeys(one.apart for one in cases if one.apart):
        counts = ", ".join(
            f"{count} {how}" for (other, how), count in sorted(apart.items()) if other == why
        )
        parts.append(f"- {why} {counts[0].upper()}{counts[1:]}.")
    parts.append("\n## Differences\n")
    parts.append(_differences(cases))
    parts.append("## Differences of pairs\n")
    parts.append(_pairs(pairs))
    return "\n".join(parts)


def _figures(cases: list[Judged], pairs: list[Judged]) -> list[list[str]]:
    told = []
    for name, some in (
        ("cases that hardware passes", [one for one in cases if one.said == PASSES]),
        ("cases that hardware fails", [one for one in cases if one.said == FAILS]),
        ("pairs of operator and dtype", pairs),
    ):
        hows = Counter("set apart" if one.apart else one.how for one in some)
        judged = sum(hows[how] for how in ("agrees", "too kind", "too strict", "wrong numbers"))
        agree = f"{hows['agrees']} ({100 * hows['agrees'] / judged:.1f} %)" if judged else "0"
        rest = (
            hows[how] for how in ("too kind", "too strict", "wrong numbers", "set apart", "skipped")
        )
        told.append([name, str(judged), agree, *map(str, rest)])
    return told


def _file(name: str, cases: list[Judged]) -> list[str]:
    counts = Counter(
        "set apart" if one.apart else f"both {one.said}" if one.how == "agrees" else one.how
        for one in cases
    )
    columns = (
        "both passes",
        "both fails",
        "too kind",
        "too strict",
        "wrong numbers",
        "set apart",
        "skipped",
    )
    return [name, *(str(counts[column] or "") for column in columns)]


def _counts(hows: list[str]) -> list[str]:
    return [str(len(hows)), str(hows.count("agrees")), str(hows.count("too kind"))]


def _dtypes(pairs: list[Judged]) -> list[list[str]]:
    counts: dict[str, Counter] = defaultdict(Counter)
    for one in pairs:
        found = pair(key(one.file, one.case)[2])
        if found and not one.apart and one.how != "skipped":
            counts[found[1]][one.said, one.how == "agrees"] += 1
    return [
        [
            dtype,
            str(told[PASSES, True] + told[PASSES, False]),
            str(told[PASSES, False] or ""),
            str(told[FAILS, True] + told[FAILS, False]),
            str(told[FAILS, False] or ""),
        ]
        for dtype, told in sorted(counts.items())
    ]


def _differences(cases: list[Judged]) -> str:
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in cases:
        if one.differs:
            groups[
                one.how,
                one.why
                or f"Not explained yet: {one.listed or line(one.message) or 'no reason given'}",
            ].append(one)
    body = []
    for (how, why), some in sorted(
        groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1])
    ):
        example = f"`{some[0].file}::{some[0].case}`"
        body.append([how, str(len(some)), _cell(why), example])
    return table(["", "cases", "reason", "for example"], body)


def _pairs(pairs: list[Judged]) -> str:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in pairs:
        found = pair(key(one.file, one.case)[2])
        if found and one.differs:
            groups[
                one.how, one.why or f"Not explained yet: {line(one.message) or found[1]}"
            ].append(" ".join(found))
    body = [
        [how, str(len(some)), _cell(why), ", ".join(sorted(some))]
        for (how, why), some in sorted(
            groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1])
        )
    ]
    return table(["", "pairs", "reason", "operator and dtype"], body)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) < 200 else text[:200] + "…"
