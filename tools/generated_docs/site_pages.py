# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A hook of mkdocs: pages that follow from the code and are not in the repository, rules and C API
of the emulator and commands, and roles in docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Each section of pages follows a page of the repository in the navigation.
GUIDES = {
    "emulator-rules/": "emulator-rules.md",
    "commands/": "environment-variables.md",
    "api-emulator-c": "api.md",
}
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>|`)")


def _pages() -> dict[str, str]:
    sys.path[:0] = [
        str(ROOT / "tools"),
        *(str(path) for path in sorted((ROOT / "packages").glob("*/src"))),
    ]
    from generated_docs import c_pages, command_pages, rule_pages

    return rule_pages.pages() | command_pages.pages() | c_pages.pages()


def on_config(config: Any) -> Any:
    """Called by mkdocs once: adds the pages to the navigation."""
    config.extra["generated"] = _pages()
    for folder, guide in GUIDES.items():
        paths = [path for path in config.extra["generated"] if path.startswith(folder)]
        _insert(config.nav, guide, [{_title(path): path} for path in paths])
    return config


def _title(path: str) -> str:
    name = Path(path).stem
    if name == "api-emulator-c":
        return "C API of the emulator"
    return f"Rules of {name}" if path.startswith("emulator-rules/") else name


def _insert(nav: list[Any], guide: str, entries: list[dict[str, str]]) -> None:
    """Insert entries after a page, in whichever section it is."""
    for position, entry in enumerate(nav):
        for value in entry.values():
            if isinstance(value, list):
                _insert(value, guide, entries)
            elif value == guide:
                nav[position + 1 : position + 1] = entries
                return


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once: adds the pages to the site."""
    from mkdocs.structure.files import File

    for path, text in config.extra["generated"].items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Called by mkdocs for each page: which pages the search ranks higher or lower, or leaves
    out."""
    path = page.file.src_uri
    boosts = [
        each for start, each in config.extra["search_boost"].items() if path.startswith(start)
    ]
    if boosts:
        page.meta["search"] = {"boost": boosts[0]}
    if path in config.extra["not_searched"]:
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs for each page: docstrings have Sphinx's roles, which Markdown has not."""
    return ROLE.sub("", content)
