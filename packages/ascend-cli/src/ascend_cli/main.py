# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend``. Its subcommands are the entry points of group
``vllm_ascend.commands`` of any wheel."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence

from ascend_platform import extension


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    A subcommand's entry point is a function that takes a parser, adds arguments to it and sets the
    default ``run``: a function from the parsed arguments to the exit status. The first line of its
    docstring is the help text. A ValueError or OSError that ``run`` raises is shown in one line,
    with exit status 2. If the reader of a pipe ends first, as ``head`` does, nothing is shown, and
    the status is that of a command that SIGPIPE ends.
    """
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-ascend", description="Diagnostics and tools for vLLM on Ascend NPUs."
    )
    wheels = ("ascend-cli", "ascend-platform")
    versions = ", ".join(f"{name} {extension.version(name)}" for name in wheels)
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    points = importlib.metadata.entry_points(group="vllm_ascend.commands")
    for point in sorted(points, key=lambda point: point.name):
        try:
            add = point.load()
            line = " ".join((add.__doc__ or "").partition("\n\n")[0].split())
            add(commands.add_parser(point.name, help=line, description=line))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"vllm-ascend: {point.name} is not available: {why}", file=sys.stderr)
    words = sys.argv[1:] if arguments is None else arguments
    name = next((word for word in words if not word.startswith("-")), "")
    near = extension.did_you_mean(name, commands.choices)
    if near and name not in commands.choices:
        parser.error(f"there is no command {name!r}; fix: vllm-ascend {near}")
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"vllm-ascend: {error}", file=sys.stderr)
        return 2
