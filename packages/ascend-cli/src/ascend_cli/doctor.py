# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend doctor``: checks of what vLLM needs to serve, each failing one with the
command that fixes it."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable

from ascend_platform.extension import installation

from ascend_cli import plugins
from ascend_cli.checks import CHECKS, Check
from ascend_cli.result import Level, Result, fail

CHECKS_GROUP = "vllm_ascend.checks"
MARKS = {
    Level.OK: ("ok  ", "\N{CHECK MARK}", "green"),
    Level.WARN: ("warn", "!", "yellow"),
    Level.FAIL: ("FAIL", "\N{BALLOT X}", "bold red"),
}
"""Of each level: its mark in a pipe, its mark on a terminal, and its style there."""


def diagnose(options: argparse.Namespace) -> dict[str, list[Result]]:
    """The results of all checks by category.

    Another wheel adds a category by an entry point of group ``vllm_ascend.checks`` with the name
    of the category. It names a function from the parsed arguments to tuples with the fields of
    :class:`Result`.
    """
    checks: dict[str, Check] = dict(CHECKS)
    for point in importlib.metadata.entry_points(group=CHECKS_GROUP):
        checks.setdefault(point.name, lambda options, point=point: point.load()(options))  # type: ignore[misc]
    chosen = [options.category] if options.category else list(checks)
    return {category: _run_check(category, checks[category], options) for category in chosen}


def _run_check(category: str, check: Check, options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    try:
        for title, state, found, fix in check(options):
            results.append(Result(title, Level(state), found, fix))
    except Exception as error:
        found = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())}"
        results.append(fail(category, found, "report it, with the output of: vllm-ascend env"))
    return results


def add(parser: argparse.ArgumentParser) -> None:
    """Check what keeps vLLM from serving on this machine, and show how to fix it."""
    more = (point.name for point in importlib.metadata.entry_points(group=CHECKS_GROUP))
    categories = [*CHECKS, *more]

    def category(text: str) -> str:  # Dashes save the quotes of a shell.
        return text if text in categories else text.replace("-", " ")

    argument = parser.add_argument("category", nargs="?", type=category, choices=categories)
    argument.metavar = "CATEGORY"  # Of choices argparse makes one word.
    argument.help = "run these checks only, of those below"
    peer = "with kv: a prefill instance's host and kv_port, to be contacted"
    parser.add_argument("--peer", metavar="HOST:PORT", help=peer)
    parser.add_argument("--json", action="store_true", help="print JSON")
    value = "also check this value of vllm serve's option"
    parser.add_argument("--additional-config", metavar="JSON", help=value)
    plain = parser.format_help
    parser.format_help = functools.partial(_help, plain, categories)  # type: ignore[method-assign]
    parser.set_defaults(run=_run)


def _help(plain: Callable[[], str], categories: list[str]) -> str:
    """The help, with the categories and the keys of --additional-config of the installed wheels."""
    plugins.plugins()  # registers their tables
    width = shutil.get_terminal_size().columns - 2  # As argparse.
    names = ", ".join(name.replace(" ", "-") for name in categories)
    indent = 2 * " "
    wrapped = textwrap.fill(
        names, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    lines = [f"categories:\n{wrapped}", "", "keys of --additional-config '{\"ascend\": {…}}':"]
    for key, default, _, text in installation.option_rows():
        lines.append(f"  {key} (default: {default})")
        indent = 6 * " "
        lines += textwrap.wrap(
            text.replace("`", ""), width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join([plain(), *lines, ""])


def _run(options: argparse.Namespace) -> int:
    found = diagnose(options)
    failed = sum(result.state == Level.FAIL for results in found.values() for result in results)
    if options.json:
        lines = [
            {"category": category, **result._asdict()}
            for category, results in found.items()
            for result in results
        ]
        print(json.dumps({"ok": not failed, "checks": lines}, indent=2))
    else:
        _print(found)
    return 1 if failed else 0


def _print(found: dict[str, list[Result]]) -> None:
    counts = Counter(result.state for results in found.values() for result in results)
    warnings = counts[Level.WARN]
    plural = "s" * (warnings != 1)
    last = f"{counts[Level.OK]} ok, {warnings} warning{plural}, {counts[Level.FAIL]} failed"
    show = _rich_printer() if sys.stdout.isatty() else None
    for category, results in found.items():
        if results:
            show(category, "bold") if show else print(category)
        for result in results:
            plain, mark, style = MARKS[result.state]
            show(f"  {mark} {result}", style) if show else print(f"  {plain} {result}")
    show(last, "bold") if show else print(last)


def _rich_printer() -> Callable[[str, str], None] | None:
    """A function that prints a line in a style on a terminal, or None if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return lambda line, style: console.print(
        line, style=style, markup=False, highlight=False, soft_wrap=True
    )
