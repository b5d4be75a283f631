# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cases of operators and refusals, from the files in ``tables/``.

A file has groups. ``over`` has lists of values, or tables of values by the name that they have in
the report; a group has a case for each combination, in which ``$name`` stands for the value.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from ascend_emulator import rules, toml

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Case:
    """One case of a table.

    Attributes:
        section: ``operators`` or ``refusals``.
        name: unique name, of the group and the values of ``over``.
        call: Python expression of the inputs.
        inputs: input's name to specification (``inputs.make``).
        reference: expression of the same inputs in float64. If empty, it is ``call``; ``none``
            means that PyTorch does not define the result.
        before: statement that runs first.
        ulps: tolerance in units in the last place of the result's dtype, relative to 1 + the
            reference's magnitude.
        gradients: whether the gradients of floating inputs are results too.
        values: whether the report has the values themselves.
        isolated: whether the case has a process of its own, since it may end its process or its
            NPU's context.
        allows: rules of the emulator that the case breaks, in a process of its own: an NPU shows
            what it computes there.
        source: where a refusal is documented or was seen.
        quick: whether the case is in the small selection (``--quick``).
    """

    section: str
    name: str
    call: str
    inputs: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    before: str = ""
    ulps: float = 0
    gradients: bool = False
    values: bool = False
    isolated: bool = False
    allows: tuple[str, ...] = ()
    source: str = ""
    quick: bool = False


def _expand(section: str, group: dict[str, Any]) -> list[Case]:
    over = {
        key: each if isinstance(each, dict) else {str(one): one for one in each}
        for key, each in group.get("over", {}).items()
    }
    cases = []
    for combination in itertools.product(*(each.items() for each in over.values())):
        chosen = {key: str(value) for key, (_, value) in zip(over, combination, strict=True)}
        words = [word.removeprefix("torch.") for word, _ in combination]

        def put(text: str, chosen: dict[str, str] = chosen) -> str:
            return Template(text).substitute(chosen)

        keys = ("ulps", "gradients", "values", "isolated", "source", "quick")
        options = {key: group[key] for key in keys if key in group}
        if "allows" in group:
            options |= {"allows": tuple(group["allows"]), "isolated": True}
        cases.append(
            Case(
                section,
                "/".join([group["name"], *words]),
                put(group["call"]),
                {name: put(text) for name, text in group.get("inputs", {}).items()},
                put(group.get("reference", "")),
                put(group.get("before", "")),
                **options,
            )
        )
    return cases


def _files(section: str) -> list[Path]:
    return sorted(TABLES.glob(f"{section}_*.toml"))


@cache
def cases(section: str) -> dict[str, Case]:
    """All cases of a section by name; those of refusals include each rule that a call can break.

    Raises:
        ValueError: two cases have the same name.
    """
    by_name: dict[str, Case] = {}
    for path in _files(section):
        for group in toml.loads(path.read_text())["group"]:
            for case in _expand(section, group):
                if case.name in by_name:
                    raise ValueError(f"{path.name}: two cases are called {case.name}")
                by_name[case.name] = case
    if section == "refusals":
        for rule in rules.rules().values():
            if rule.case:
                name = f"rule/{rule.id}"
                by_name[name] = Case(
                    section, name, rule.case.call, rule.case.inputs, source=rule.source
                )
    return by_name


def version() -> str:
    """A hash of all tables: reports of different tables are compared by the cases that
    they share."""
    paths = (*sorted(TABLES.glob("*.toml")), *rules.files())
    texts = (path.read_bytes() for path in paths)
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]
