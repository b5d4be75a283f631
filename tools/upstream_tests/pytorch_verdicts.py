# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of PyTorch's own tests on real NPUs, from the lists that Ascend/pytorch publishes (see
tools/upstream)."""

from __future__ import annotations

import fnmatch
import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PASSES, FAILS = "passes", "fails"
DEVICE = re.compile(r"(Device)?(PRIVATEUSE1|NPU|CPU)$")
DTYPES = r"bfloat16|bool|complex(?:32|64|128)|float(?:16|32|64)|u?int(?:8|16|32|64)"
PAIR = re.compile(
    rf"^test_(?:dispatch_symbolic_|dispatch_|)meta_outplace_(\w+)_(?:npu|cpu)_({DTYPES})$"
)
VARIANTS = [
    "test_meta_outplace",
    "test_dispatch_meta_outplace",
    "test_dispatch_symbolic_meta_outplace",
]
NUMBERS = re.compile(
    r"are not close|are not equal|Mismatched elements|Jacobian mismatch|not within tolerance"
)

Case = tuple[str, str, str]  # File, class without the device suffix, name.


def key(file: str, case: str) -> Case:
    """A case in a form that the lists and an installed torch share: releases differ in how they end
    a class's name."""
    owner, _, name = case.partition("::")
    return file, DEVICE.sub("", owner), name


def on_cpu(case: str) -> str:
    """The name of the same case when the CPU is the device under test."""
    owner, _, name = case.partition("::")
    head, _, tail = name.rpartition("_npu")
    return f"{re.sub('(PRIVATEUSE1|NPU)$', 'CPU', owner)}::{head}_cpu{tail}"


def pair(name: str) -> tuple[str, str] | None:
    """Operator and dtype of one of test_meta's out-of-place cases."""
    found = PAIR.match(name)
    return (found[1], found[2]) if found else None


@dataclass
class Verdicts:
    """The lists.

    Attributes:
        disabled: cases that are disabled because they fail, with the reason.
        failed: cases that failed in a run, without a reason.
        skipped: cases that skip themselves: no verdict.
        complete: files that were run as a whole, so that a case in no list has passed.
    """

    disabled: dict[Case, str] = field(default_factory=dict)
    failed: set[Case] = field(default_factory=set)
    skipped: set[Case] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)

    def of(self, case: Case) -> str | None:
        """Hardware's result of a case; None if unknown."""
        if case in self.disabled or case in self.failed:
            return FAILS
        if case in self.skipped or case[0] not in self.complete:
            return None
        return PASSES

    def of_pair(self, case: Case) -> str | None:
        """Hardware's result for an operator and a dtype: test_meta's three variants have to
        agree."""
        found = pair(case[2])
        if not found:
            return None
        operator, dtype = found
        said = {
            self.of((case[0], case[1], f"{variant}_{operator}_npu_{dtype}")) for variant in VARIANTS
        }
        return said.pop() if len(said) == 1 else None


def read(directories: Iterable[Path]) -> Verdicts:
    """The lists of Ascend/pytorch's continuous integration; each file is in one of the
    directories."""
    files = {
        path.name: path.read_text()
        for directory in directories
        for path in directory.iterdir()
        if path.is_file()
    }

    def case(node: str) -> Case:
        file, _, rest = node.partition("::")
        return key(file.removeprefix("test/"), rest)

    entries = [json.loads(line) for line in files["pr_skip_list.jsonl"].splitlines() if line]
    return Verdicts(
        {
            case(node): entry["reason"]
            for node, entry in json.loads(files["disabled_testcases.json"]).items()
        },
        {case(node) for node in json.loads(files["skip_list.json"])["skip_nodeids"]}
        | {case(entry["nodeid"]) for entry in entries if "nodeid" in entry},
        {case(node) for node in json.loads(files["running_skiped_testcases.json"])},
        set(re.findall(r"- test/(\S+\.py)", files["test_whitelist.yml"])),
    )


def noise(identifier: str, said: str | None, listed: str, rules: list[dict]) -> str | None:
    """Why a verdict says nothing about the NPU, if it does not.

    Args:
        identifier: `file.py::Class::case`.
        listed: the list's reason; what has one is a verdict, unless a rule is about this reason.
    """
    for rule in rules:
        of_rule = listed == rule.get("listed", "") and said in rule.get("hardware", [PASSES, FAILS])
        if of_rule and any(fnmatch.fnmatchcase(identifier, pattern) for pattern in rule["cases"]):
            return " ".join(rule["reason"].split())
    return None


def choose(
    file: str, names: Iterable[str], verdicts: Verdicts, settings: Mapping, seed: int, share: float
) -> dict[str, str]:
    """The cases of a file to run, by stratum: each verdict with each reason, and what is told apart
    as noise.

    Returns each with `sample`, `pair` (one for each operator and dtype of test_meta) or `both`.
    """
    strata: dict[tuple, list[str]] = {}
    pairs: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        case = key(file, name)
        said = verdicts.of(case)
        if said:
            listed = verdicts.disabled.get(case, "")
            why = noise(f"{file}::{name}", said, listed, settings["noise"])
            strata.setdefault((said, listed, why or ""), []).append(name)
        found = pair(case[2])
        if (
            found
            and verdicts.of_pair(case)
            and (found not in pairs or case[2].startswith(VARIANTS[0]))
        ):
            pairs[found] = name
    chosen: dict[str, str] = {}
    for (said, reason, why), cases in strata.items():
        most = settings["limits"].get(file, settings["limits"]["default"])
        limit = most["noise"] if why else most["reason"] if reason else most[said]
        random.Random(f"{seed} {file} {said} {reason} {why}").shuffle(cases)
        chosen |= dict.fromkeys(cases[: max(1, round(limit * share))], "sample")
    order = sorted(pairs)
    random.Random(f"{seed} pairs").shuffle(order)
    for found in order[: round(len(order) * share)]:
        chosen[pairs[found]] = "both" if pairs[found] in chosen else "pair"
    return chosen


def agreement(said: str, outcome: str, message: str) -> str:
    """How the emulator's outcome of a case compares with hardware's verdict."""
    if outcome in ("skipped", "other chip"):
        return "skipped"
    if (outcome == "passed") == (said == PASSES):
        return "agrees"
    if outcome == "passed":
        return "too kind"
    return "wrong numbers" if outcome == "failed" and NUMBERS.search(message) else "too strict"
