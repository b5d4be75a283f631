# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Command ``ascend-emulator``: run programs on emulated NPUs, build the libraries, show coverage
and traces, verify NPUs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ascend_emulator import build, rules, variables
from ascend_emulator.activation import (
    DEFAULT_SOC,
    STRICT,
    disable,
    parse_size,
    set_environment,
    set_strict,
)
from ascend_emulator.chips import chips
from ascend_emulator.faults import KINDS, checked
from ascend_emulator.verify import command as verify

SANITIZE = (
    "build with the address and undefined-behaviour sanitizers"
    " (ASCEND_EMULATOR_SANITIZE=address,undefined)"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; fix: see {self.prog} --help\n")


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """A value's check, whose message argparse would replace."""

    def parse(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _numerics(text: str) -> str:
    if wrong := variables.problem("NUMERICS", text):
        raise argparse.ArgumentTypeError(wrong)
    return text


def _size(text: str) -> int:
    """parse_size, whose message argparse would replace."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _time(text: str) -> str:
    """The report of ``modelled=REPORT``, empty of ``modelled``."""
    kind, _, report = text.partition("=")
    if kind != "modelled":
        raise argparse.ArgumentTypeError(f"{text!r}; supported: modelled and modelled=REPORT")
    return report


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ascend-emulator",
        description="Emulated Ascend NPUs: CANN's shared libraries on the CPU.",
    )
    parser.add_argument(
        "--version", action="version", version=f"ascend-emulator {verify.emulator_version()}"
    )
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=description, description=description)
        added.set_defaults(parser=added)
        return added

    run = add("run", "run a command, including its child processes, with emulated NPUs")
    run.add_argument("--npus", type=int, default=1, help="number of NPUs (default: 1)")
    run.add_argument(
        "--soc", default=DEFAULT_SOC, help=f"chip: {', '.join(chips())} (default: {DEFAULT_SOC})"
    )
    run.add_argument(
        "--memory",
        type=_size,
        help="device memory per NPU, such as 8GiB (default: the chip's, limited by this machine's)",
    )
    run.add_argument(
        "--driver",
        default="",
        metavar="VERSION",
        help=(
            "version of the NPUs' driver, such as 25.5.1 (default: unknown); it selects what"
            " happens when streams are used up"
        ),
    )
    run.add_argument(
        "--without",
        default="",
        metavar="NAMES",
        help="comma-separated entry points to disable: calling one fails with its name",
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        type=_checked(checked),
        metavar="NAME@N=KIND",
        help=(
            "make the Nth call of an entry point fail (N+: and all later ones), such as"
            f" aclrtMalloc@3=oom; repeatable; faults: {', '.join(KINDS)}"
        ),
    )
    run.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="RULE",
        help=(
            "do not refuse what breaks this rule, and report at exit how many calls broke it;"
            " repeatable; `ascend-emulator rules` lists the rules"
        ),
    )
    run.add_argument("--sanitize", action="store_true", help=SANITIZE)
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace for Perfetto (`ascend-emulator trace FILE` prints a summary)",
    )
    run.add_argument(
        "--time",
        type=_time,
        metavar="modelled[=REPORT]",
        help=(
            "let events, profiles and traces show modelled times of an NPU instead of this CPU's;"
            " a report of `ascend-emulator verify` on an NPU corrects the laws"
        ),
    )
    run.add_argument(
        "--adversary",
        type=int,
        metavar="SEED",
        help=(
            "run tasks as late as possible in a random, reproducible order that the events allow,"
            " to find missing waits"
        ),
    )
    run.add_argument(
        "--numerics",
        type=_numerics,
        metavar="jitter:SEED|generic",
        help=(
            "jitter: move approximated functions and sums by up to one unit in the last place, to"
            " find tolerances that are too tight; generic: compute without the processor's vector"
            " units; or both, separated by a comma"
        ),
    )
    run.add_argument("--strict", action="store_true", help=STRICT)
    run.add_argument(
        "--null",
        action="store_true",
        help="do not execute operators, to measure the host's overhead",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    compiling = add(
        "build", "compile the libraries if they are not cached, and print their directory"
    )
    compiling.add_argument("--sanitize", action="store_true", help=SANITIZE)
    trace = add("trace", "summarize a trace: calls, bytes, FLOPs, emulated and modelled time")
    trace.add_argument(
        "file", type=Path, help="what `ascend-emulator run --trace FILE` has written"
    )
    add("rules", "list the rules of operators: id, basis, source, and limits")
    coverage = add(
        "coverage", "list the names that the installed torch_npu can look up, and their state"
    )
    coverage.add_argument(
        "--markdown", action="store_true", help="print Markdown for the documentation"
    )
    verify.add_options(
        add("verify", "report what this machine's NPU, or the emulator, computes and refuses")
    )
    return parser


def _usage(message: str) -> int:
    print(f"ascend-emulator run: {message}", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        return _usage(
            "no command given; add it after --, such as: ascend-emulator run -- vllm serve MODEL"
        )
    if options.time is not None and options.null:
        return _usage("--time needs the operators that --null leaves out; fix: without one of them")
    environ = dict(os.environ)
    if options.numerics:
        environ["ASCEND_EMULATOR_NUMERICS"] = options.numerics
    if options.time is not None:
        environ["ASCEND_EMULATOR_TIME"] = "modelled"
    if options.without:
        disable(environ, options.without)
    if options.allow:
        environ["ASCEND_EMULATOR_ALLOW"] = ",".join(options.allow)
    if options.fault:
        environ["ASCEND_EMULATOR_FAULTS"] = ";".join(options.fault)
    if options.adversary is not None:
        environ["ASCEND_EMULATOR_ADVERSARY"] = str(options.adversary)
    if options.strict:
        set_strict(environ)
    if options.null:
        environ["ASCEND_EMULATOR_NULL"] = "1"
    report = Path(options.time) if options.time else None
    line = set_environment(
        environ, options.npus, options.soc, options.memory, report, options.driver
    )
    if options.trace:
        path = Path(options.trace).resolve()
        try:
            path.write_text("[\n")  # Every process appends one event per line.
        except OSError as error:
            return _usage(f"cannot write the trace to {path}: {error.strerror}")
        environ["ASCEND_EMULATOR_TRACE"] = str(path)
    print(line, file=sys.stderr, flush=True)
    # Python ignores it, which the command would inherit.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        print(f"ascend-emulator run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _text(options: argparse.Namespace) -> str:
    """Output of a subcommand."""
    if options.action == "build":
        return str(build.library_dir())
    if options.action == "rules":
        return rules.table()
    if options.action == "trace":
        from ascend_emulator.tracing import table

        return table(options.file)
    from ascend_emulator.coverage import report

    return report(markdown=options.markdown)


def _act(arguments: list[str] | None) -> int:
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        known = re.findall(r"--[a-z]+", options.parser.format_help())
        near = variables.did_you_mean(unknown[0].partition("=")[0], known)
        options.parser.error(f"{unknown[0]} is no option{near}")
    if getattr(options, "sanitize", False):
        os.environ["ASCEND_EMULATOR_SANITIZE"] = build.SANITIZERS
    try:
        variables.check(os.environ)
        if options.action == "run":
            return _run(options)
        if options.action == "verify":
            return verify.main(options)
        print(_text(options))
        return 0
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        named = error.filename is not None
        what = f"cannot use {error.filename}: {error.strerror}" if named else error
        print(f"ascend-emulator {options.action}: {what}", file=sys.stderr)
        return 2 if named else 1
    except ValueError as error:
        print(f"ascend-emulator {options.action}: {error}", file=sys.stderr)
        return 2


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status: 2 for a wrong command line or
    variable, 1 for what failed."""
    try:
        try:
            return _act(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # The reader of the output has ended, such as `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
