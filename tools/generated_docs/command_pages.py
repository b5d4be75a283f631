# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pages of the wheels' commands, from the parsers of their arguments, which import neither torch
nor vLLM."""

from __future__ import annotations

import argparse
import html
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
WITHIN = 100
"""Columns of usage lines."""


class Formatter(argparse.HelpFormatter):
    """Lines of the same width on every machine."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WITHIN)


def pages() -> dict[str, str]:
    """Text of each page, by its path below docs."""
    emulator = importlib.import_module("ascend_emulator.cli")._parser()
    commands = "\n".join(_section(parser) for parser in _subcommands())
    return {
        "commands/ascend-emulator.md": (
            "# ascend-emulator\n\nThe command of the [emulator](../emulator.md), with all options;"
            f" [these](../emulator-options.md) are explained.\n\n{_section(emulator)}"
        ),
        "commands/vllm-ascend.md": (
            "# vllm-ascend\n\nDiagnostics and tools for vLLM on Ascend NPUs;"
            f" [examples](../doctor.md).\n\n{commands}"
        ),
    }


def _subcommands() -> Iterator[argparse.ArgumentParser]:
    """Parsers of the entry points of group ``vllm_ascend.commands``, which the wheels declare."""
    declared: dict[str, str] = {}
    for path in PACKAGES.glob("*/pyproject.toml"):
        points = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        declared |= points.get("vllm_ascend.commands", {})
    for name, target in sorted(declared.items()):
        module, _, function = target.partition(":")
        add: Any = getattr(importlib.import_module(module), function)
        text = " ".join((add.__doc__ or "").partition("\n\n")[0].split())
        parser = argparse.ArgumentParser(f"vllm-ascend {name}", description=text)
        add(parser)
        yield parser


def _section(parser: argparse.ArgumentParser) -> str:
    """Usage, description and options of a command, then of its subcommands."""
    parser.formatter_class = Formatter
    formatter = Formatter(parser.prog)
    usage = parser.format_usage().removeprefix("usage: ").strip()
    description = html.escape(" ".join((parser.description or "").split()), quote=False)
    lines, subcommands = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands += [_section(each) for each in dict.fromkeys(action.choices.values())]
        elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
            name = formatter._format_action_invocation(action)
            text = formatter._expand_help(action) if action.help else ""
            text = html.escape(" ".join(text.split()), quote=False)
            lines.append(f"- `{name}`: {text}" if text else f"- `{name}`")
    parts = [f"## {parser.prog}", description, f"```\n{usage}\n```", "\n".join(lines)]
    return "\n\n".join([*filter(None, parts), *subcommands]) + "\n"
