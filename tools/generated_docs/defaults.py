# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Defaults for speed, their evidence and their switches: tables of docs/defaults.md, from
defaults.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any

from generated_docs.markdown import table

DATA = Path(__file__).with_name("defaults.toml")
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"


def data() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(DATA.read_text())


def linked(source: str) -> str:
    """A source, with links to the threads that it names by number only."""
    return re.sub(r"(?<![\w.] )(?<![\w.])\d{4,5}(?![\w.])", rf"[\g<0>]({THREADS}\g<0>)", source)


def switch(off: dict[str, str]) -> str:
    """Option, or variable, that switches a default off."""
    kind, name = next(iter(off.items()))
    if kind == "serve":
        return f"`{name}`"
    return f"`{name}={off['value']}`" if kind == "variable" else f"`{name}`: `{off['value']}`"


def evidence() -> str:
    """Each default that is there for speed."""
    rows = []
    for each in data()["default"]:
        state = "on" if each.get("is_on", True) else "off"
        cells = [each["what"], state, each["why"], linked(each["source"])]
        rows.append([*cells, each["chip"], each["number"], switch(each["off"])])
    head = ["default", "is", "why", "evidence", "chip", "number", "off by"]
    return table(head, rows)


def published() -> str:
    """Features that vllm-ascend has measured, and whether they are built here."""
    rows = [
        [each["what"], linked(each["source"]), each["number"], each["state"]]
        for each in data()["published"]
    ]
    return table(["feature", "published in", "number", "here"], rows)
