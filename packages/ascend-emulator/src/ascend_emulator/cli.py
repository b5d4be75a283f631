"""Command ``ascend-emulator``: runs programs on emulated NPUs, builds the libraries, lists what they cover, sums up traces."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ascend_emulator import build
from ascend_emulator.activation import DEFAULT_SOC, parse_size, set_environment
from ascend_emulator.chips import chips
from ascend_emulator.faults import KINDS, checked

SANITIZE = "compiled with the address and undefined-behaviour sanitizers, as with ASCEND_EMULATOR_SANITIZE=address,undefined"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ascend-emulator", description="CANN's shared libraries, computed on the CPU.")
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run a command with emulated NPUs, its child processes included")
    run.add_argument("--npus", type=int, default=1, help="how many (default: 1)")
    run.add_argument("--soc", default=DEFAULT_SOC, help=f"chip: {', '.join(chips())} (default: {DEFAULT_SOC})")
    run.add_argument(
        "--memory", type=parse_size, help="device memory each, such as 8GiB (default: the chip's, or what this machine can hold)"
    )
    run.add_argument(
        "--without",
        default="",
        metavar="NAMES",
        help="entry points to take out, separated by commas: calling one then refuses by its name",
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME@N=KIND",
        help="let the Nth call of an entry point fail (N+: and every later one), such as aclrtMalloc@3=oom; again for more; "
        f"kinds: {', '.join(KINDS)}",
    )
    run.add_argument("--sanitize", action="store_true", help=SANITIZE)
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="write what the NPUs do to a file that Perfetto opens (ascend-emulator trace has the table)",
    )
    run.add_argument(
        "--adversary",
        type=int,
        metavar="SEED",
        help="run streams as late and in as odd an order as events allow, the same for the same seed: a missing wait fails",
    )
    run.add_argument("--null", action="store_true", help="compute no operator, so that the host's own cost can be measured")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    compiling = commands.add_parser("build", help="compile the libraries if they are not in the cache, and print where they are")
    compiling.add_argument("--sanitize", action="store_true", help=SANITIZE)
    trace = commands.add_parser("trace", help="the table of a trace: calls, bytes, operations, emulated and estimated time")
    trace.add_argument("file", type=Path)
    coverage = commands.add_parser("coverage", help="what the installed torch_npu can ask for, and what becomes of it")
    coverage.add_argument("--markdown", action="store_true", help="as a table for the documentation")
    return parser


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        print(
            "ascend-emulator run: no command; write it after --, as in: ascend-emulator run -- vllm serve MODEL", file=sys.stderr
        )
        return 2
    environ = dict(os.environ)
    line = set_environment(environ, options.npus, options.soc, options.memory)
    if options.without:
        environ["ASCEND_EMULATOR_WITHOUT"] = options.without
    if options.fault:
        environ["ASCEND_EMULATOR_FAULTS"] = ";".join(map(checked, options.fault))
    if options.trace:
        path = Path(options.trace).resolve()
        try:
            path.write_text("[\n")  # an event a line follows, from every process
        except OSError as error:
            print(f"ascend-emulator run: cannot write the trace to {path}: {error.strerror}", file=sys.stderr)
            return 2
        environ["ASCEND_EMULATOR_TRACE"] = str(path)
    if options.adversary is not None:
        environ["ASCEND_EMULATOR_ADVERSARY"] = str(options.adversary)
    if options.null:
        environ["ASCEND_EMULATOR_NULL"] = "1"
    print(line, file=sys.stderr, flush=True)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        print(f"ascend-emulator run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    options = _parser().parse_args(arguments)
    if getattr(options, "sanitize", False):
        os.environ["ASCEND_EMULATOR_SANITIZE"] = build.SANITIZERS
    try:
        if options.action == "run":
            return _run(options)
        if options.action == "build":
            print(build.library_dir())
            return 0
        if options.action == "trace":
            from ascend_emulator.tracing import table

            print(table(options.file))
            return 0
        from ascend_emulator.coverage import report

        print(report(markdown=options.markdown))
        return 0
    except (build.BuildError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
