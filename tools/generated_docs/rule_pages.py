# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pages of the emulator's rules, one for each folder of operators, from the tables beside the
operators' sources. Each rule has its id as an anchor."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

from ascend_emulator import facts, rules
from ascend_emulator.rules import Case, Description, Rule

SOURCES = Path(rules.__file__).with_name("csrc")
BLOB = "https://github.com/vllm-ascend-all/vllm-ascend-all/blob/main/packages/ascend-emulator/src/ascend_emulator/csrc"


def pages() -> dict[str, str]:
    """Text of each page, by its path below docs."""
    folders: dict[str, list[Description]] = {}
    for each in rules.descriptions():
        folders.setdefault(each.family.split("/")[-2], []).append(each)
    return {
        f"emulator-rules/{folder}.md": _page(folder, folders[folder]) for folder in sorted(folders)
    }


def _page(folder: str, descriptions: list[Description]) -> str:
    count = sum(len(each.rules) for each in descriptions)
    head = (
        f"# Rules: {folder}\n\nThe {count} rules of `{folder}/` in the emulator's sources, which the"
        f" emulator checks at each call. [Rules of operators](../emulator-rules.md) explains them.\n"
    )
    return "\n".join([head, *map(_section, descriptions)])


def _section(description: Description) -> str:
    operators = ", ".join(f"`{name}`" for name in description.operators) or "All operators"
    facts_of = facts.resources(description.operators[0]) if description.operators else {}
    costs = ", ".join(f"{fact}: {value}" for fact, value in facts_of.items())
    lines = [f"## {description.name}", "", f"{operators}, in `{description.family}.cpp`."]
    if costs:
        lines[-1] += f" {costs}."
    valid = description.valid
    if valid:
        values = "".join(f"\n# {name}: {text}" for name, text in valid.inputs.items())
        lines += ["", f"```python\n{valid.call}{values}\n```"]
    # Closed, since a page has hundreds of rules; an anchor of a rule opens it.
    count = len(description.rules)
    items = "\n".join(_rule(rule, valid) for rule in description.rules)
    summary = f"<summary>{count} rule{'s' * (count > 1)}</summary>"
    lines += ["", f"<details>{summary}<ul>\n{items}\n</ul></details>", ""]
    return "\n".join(lines)


@functools.cache
def _checks() -> dict[str, str]:
    """Links to the checks of the rules that are in C++."""
    links: dict[str, str] = {}
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        text = path.read_text()
        for match in re.finditer(r'\brule\(\s*"([\w.-]+)"', text):
            line = text.count("\n", 0, match.start()) + 1
            file = path.relative_to(SOURCES)
            links.setdefault(match[1], f'<a href="{BLOB}/{file}#L{line}">checked in {file}</a>')
    return links


def _rule(rule: Rule, valid: Case | None) -> str:
    """An item of a list: the limit, its source, the document's words, and a call that breaks it.

    Only the first line is searched.
    """
    limits = ", ".join(map(_code, rule.limits)) or _checks()[rule.id]
    if rule.when:
        limits += f" when {' and '.join(map(_code, rule.when))}"
    details = [html.escape(f"{rule.basis}: {rule.source}")]
    details += [html.escape(f"“{sentence}”") for sentence in rule.says]
    if rule.case and valid:
        changed = [f"{k}: {v}" for k, v in rule.case.inputs.items() if valid.inputs.get(k) != v]
        if rule.case.call != valid.call:
            changed.insert(0, rule.case.call)
        details.append(f"broken by {', '.join(map(_code, changed))}")
    elif rule.id.endswith(".chip"):
        details.append("broken by any call on another chip (<code>--soc</code>)")
    elif rule.case:
        details.append(f"broken by {_code(rule.case.call)}")
    else:
        details.append("no example in <code>ascend-emulator verify</code>")
    items = "".join(f"<li>{each}</li>" for each in details)
    return (
        f'<li><a id="{rule.id}"></a><strong>{_code(rule.id)}</strong>: {limits}'
        f"<ul data-search-exclude>{items}</ul></li>"
    )


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"
