# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A hook of mkdocs: pages of the emulator's rules, one for each folder of operators.

They follow from the tables beside the operators' sources and are not in the repository. Each rule
has its id as an anchor.
"""

from __future__ import annotations

import functools
import html
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend_emulator.rules import Case, Description, Rule

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "emulator-rules.md"


@functools.cache
def pages() -> dict[str, str]:
    """Text of each page, by its path below docs."""
    sys.path.insert(0, str(ROOT / "packages" / "ascend-emulator" / "src"))
    rules = importlib.import_module("ascend_emulator.rules")
    folders: dict[str, list[Description]] = {}
    for each in rules.descriptions():
        folders.setdefault(each.family.split("/")[1], []).append(each)
    return {
        f"emulator-rules/{folder}.md": _page(folder, folders[folder]) for folder in sorted(folders)
    }


def _page(folder: str, descriptions: list[Description]) -> str:
    count = sum(len(each.rules) for each in descriptions)
    head = (
        f"# Rules: {folder}\n\nThe {count} rules of the operators in `csrc/ops/{folder}/`, which the"
        f" emulator checks at each call. [Rules of operators](../{GUIDE}) explains them.\n"
    )
    return "\n".join([head, *map(_section, descriptions)])


def _section(description: Description) -> str:
    operators = ", ".join(f"`{name}`" for name in description.operators)
    lines = [f"## {description.name}", "", f"{operators}, in `{description.family}.cpp`."]
    valid = description.valid
    if valid:
        values = "".join(f"\n# {name}: {text}" for name, text in valid.inputs.items())
        lines += ["", f"```python\n{valid.call}{values}\n```"]
    lines += ["", *(_rule(rule, valid) for rule in description.rules), ""]
    return "\n".join(lines)


def _rule(rule: Rule, valid: Case | None) -> str:
    """An item of a list: the limit, its source, the document's words, and a call that breaks it."""
    limits = ", ".join(f"`{limit}`" for limit in rule.limits) or "checked in C++"
    if rule.when:
        limits += " when " + " and ".join(f"`{condition}`" for condition in rule.when)
    lines = [
        f'- <a id="{rule.id}"></a>**`{rule.id}`**: {limits}',
        f"    - {rule.basis}: {html.escape(rule.source)}",
        *(f"    - “{html.escape(sentence)}”" for sentence in rule.says),
    ]
    if rule.case and valid:
        changed = [f"{k}: {v}" for k, v in rule.case.inputs.items() if valid.inputs.get(k) != v]
        if rule.case.call != valid.call:
            changed.insert(0, rule.case.call)
        lines.append(f"    - broken by {', '.join(f'`{each}`' for each in changed)}")
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """Called by mkdocs once: adds the pages to the navigation, after the guide."""
    _extend(config.nav)
    return config


def _extend(nav: list[Any]) -> None:
    for position, entry in enumerate(nav):
        for value in entry.values():
            if isinstance(value, list):
                _extend(value)
            elif value == GUIDE:
                nav[position + 1 : position + 1] = [
                    {f"Rules of {Path(path).stem}": path} for path in pages()
                ]


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once: adds the pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
