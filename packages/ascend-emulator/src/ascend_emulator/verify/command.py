# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Command ``verify``: runs the cases in processes of their own, shows progress, and writes the
report."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ascend_emulator.variables import did_you_mean
from ascend_emulator.verify import (
    child,
    collectives,
    diff,
    launches,
    markdown,
    report,
    runtime,
    tables,
    timings,
)

Name = tuple[str, str]
FIRST_SECONDS = 300.0  # Until the first case: torch_npu's import, and the first operator's kernels.
CASE_SECONDS = 90.0
# In addition to the collectives: after a failure it is checked whether the NPU still computes.
SPARE_SECONDS = 60.0
BUSY_PERCENT = 20
QUICK_RUNTIME = (
    "streams-run-in-order-of-events",
    "events-measure-time",
    "graphs-replay-with-new-inputs",
    "memory-granularity",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``ascend-emulator verify``."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("ascend-report"),
        help="name of the report, without .json and .md",
    )
    parser.add_argument(
        "--device",
        type=int,
        default=0,
        help="NPU to use (default: 0); nothing else should use it meanwhile",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="cases that are left after this time are not run (default: 10)",
    )
    parser.add_argument(
        "--only",
        metavar="SECTIONS",
        default=",".join(name for name in report.SECTIONS if name != "launches"),
        help="comma-separated sections",
    )
    parser.add_argument(
        "--timings",
        action="store_true",
        help="also times for `vllm-ascend plan --report`, in about five more minutes",
    )
    parser.add_argument(
        "--select",
        metavar="PATTERN",
        default="*",
        help="cases whose names match, such as 'matmul*'",
    )
    parser.add_argument("--quick", action="store_true", help="a selection of the cases, in seconds")
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two reports; exit 1 if they disagree",
    )
    parser.add_argument(
        "--check", nargs="+", type=Path, metavar="FILE", help="check the form of reports"
    )


def emulator_version() -> str:
    """Version of this package; "unknown" if it runs from its sources, without being installed."""
    try:
        return version("ascend-emulator")
    except PackageNotFoundError:
        return "unknown"


def selected(options: argparse.Namespace) -> list[Name]:
    """The cases to run, in order.

    Raises:
        ValueError: an unknown section, or no case matches.
    """
    sections = options.only.split(",")
    unknown = [section for section in sections if section not in report.SECTIONS]
    if unknown:
        raise ValueError(
            f"unknown section {unknown[0]!r}{did_you_mean(unknown[0], report.SECTIONS)};"
            f" supported: {', '.join(report.SECTIONS)}"
        )
    names: dict[str, list[str]] = {
        section: [n for n, case in tables.cases(section).items() if case.quick or not options.quick]
        for section in ("operators", "refusals")
    }
    names |= {
        "runtime": [name for name in runtime.PROGRAMS if name not in runtime.LIMITS],
        "timings": list(timings.PROGRAMS),
        "launches": list(launches.PROGRAMS),
        "collectives": list(collectives.NAMES),
        "limits": sorted(runtime.LIMITS),
    }
    if options.quick:
        names |= {"runtime": list(QUICK_RUNTIME), "timings": [], "collectives": [], "limits": []}
    cases = [
        (section, name)
        for section in report.SECTIONS
        if section in sections
        for name in names.get(section, [])
        if fnmatch.fnmatchcase(name, options.select)
    ]
    if not cases:
        every = [name for section in sections for name in names.get(section, [])]
        near = did_you_mean(options.select, every)
        raise ValueError(f"no case of {options.only} matches {options.select!r}{near}")
    return [("environment", "environment"), *cases]


def _isolated(case: Name) -> bool:
    section, name = case
    if section in ("operators", "refusals"):
        return tables.cases(section)[name].isolated
    return _starts_ranks(case) or name in runtime.ISOLATED


def _environment(cases: list[Name]) -> dict[str, str]:
    """The variables of the process of these cases, with the rules that one of them breaks."""
    broken = [
        rule
        for section, name in cases
        if section in ("operators", "refusals")
        for rule in tables.cases(section)[name].allows
    ]
    allowed = os.environ.get("ASCEND_EMULATOR_ALLOW")
    names = ",".join([*([allowed] if allowed else []), *broken])
    return {**os.environ, **({"ASCEND_EMULATOR_ALLOW": names} if broken else {})}


def _starts_ranks(case: Name) -> bool:
    """Whether a case starts a process for each of several NPUs."""
    return case[0] == "collectives" or case[1] == collectives.BY_SIZE


def _seconds(case: Name) -> float:
    """How long a case may take."""
    if case[1] == collectives.BY_SIZE:
        return 4 * collectives.SECONDS + SPARE_SECONDS
    return collectives.SECONDS + SPARE_SECONDS if case[0] == "collectives" else CASE_SECONDS


def _batches(cases: list[Name]) -> Iterator[list[Name]]:
    """Cases of one process: isolated ones come last and have a process each."""
    yield [case for case in cases if not _isolated(case)]
    yield from ([case] for case in cases if _isolated(case))


class Run:
    """One run of the command: records by section, and what is left to do."""

    def __init__(self, cases: list[Name], options: argparse.Namespace) -> None:
        self.cases, self.options, self.started = cases, options, time.monotonic()
        self.records: dict[Name, dict[str, Any]] = {}
        self.stopped = ""

    def remaining(self) -> float:
        """Seconds until the time is used up."""
        return self.started + 60 * self.options.minutes - time.monotonic()

    def progress(self, case: Name) -> None:
        """The line of progress: on a terminal it replaces the last one."""
        bad = sum(
            record["outcome"] in ("failed", "crashed", "hung") for record in self.records.values()
        )
        seconds = time.monotonic() - self.started
        line = (
            f"{len(self.records)} of {len(self.cases)} cases, {bad} failed, {seconds:.0f} s:"
            f" {' '.join(case)}"
        )
        if sys.stderr.isatty():
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)
        elif len(self.records) % 50 == 0:
            print(line, file=sys.stderr, flush=True)

    def reason_to_skip(self, case: Name) -> str:
        """Why a case cannot run on this machine; empty if it can."""
        facts = self.records.get(("environment", "environment"), {}).get("facts", {})
        if _starts_ranks(case) and facts.get("npus", 0) < 2:
            return "one NPU"
        if case[0] == "limits" and facts.get("memory_used_percent", 0) > BUSY_PERCENT:
            return "other programs use this NPU"
        return ""

    def everything(self) -> None:
        """Run all cases."""
        for batch in _batches(self.cases):
            left = batch
            while left:
                for case in left:
                    if why := self.reason_to_skip(case):
                        self.records[case] = {"outcome": "skipped", "why": why}
                left = [case for case in left if case not in self.records]
                if not left:
                    break
                if self.remaining() <= 0:
                    self.records |= {case: self._over() for case in left}
                    break
                self.process(left)
                if not self.records.get(("environment", "environment"), {}).get("facts"):
                    return  # Without an NPU or torch_npu nothing else can run.
                left = [case for case in left if case not in self.records]

    def process(self, cases: list[Name]) -> None:
        """Run cases in one process, until it has ended or a case takes too long. At least one gets
        a record."""
        read, write = os.pipe()
        os.set_inheritable(write, True)
        worker = subprocess.Popen(
            [sys.executable, "-m", child.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[write],
            text=True,
            env=_environment(cases),
            start_new_session=True,  # Together with the processes that a case starts.
        )
        os.close(write)
        task = {
            "pipe": write,
            "device": self.options.device,
            "options": {"short": self.options.quick},
            "cases": cases,
        }
        with suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(task))  # type: ignore[union-attr]
            worker.stdin.close()  # type: ignore[union-attr]
        try:
            self._follow(worker, read, cases)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            os.close(read)

    def _follow(self, worker: subprocess.Popen[str], read: int, cases: list[Name]) -> None:
        """Read the process's records and its errors until both end."""
        selector = selectors.DefaultSelector()
        selector.register(read, selectors.EVENT_READ, "records")
        selector.register(worker.stderr, selectors.EVENT_READ, "errors")  # type: ignore[arg-type]
        current, buffer, errors = None, b"", b""
        limit = FIRST_SECONDS
        deadline = time.monotonic() + limit
        while selector.get_map():
            timeout = min(deadline - time.monotonic(), max(self.remaining(), 0) + 1)
            ready = selector.select(max(timeout, 0.0))
            if not ready:
                hung = {"outcome": "hung", "why": f"no result in {limit:.0f} s"}
                is_late = time.monotonic() >= deadline
                self.records[current or cases[0]] = hung if is_late else self._over()
                return
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.data == "errors":
                    errors = (errors + chunk)[-8000:]
                else:
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in map(json.loads, lines):
                        if "begin" in line:
                            current = tuple(line["begin"])
                            limit = _seconds(current)
                            self.progress(current)
                        else:
                            self.records[tuple(line["end"])] = line["record"]
                            current, limit = None, CASE_SECONDS
                        deadline = time.monotonic() + limit
        status = worker.wait()
        if current or not any(case in self.records for case in cases):
            from ascend_emulator.verify.errors import last_words

            why = last_words(errors.decode(errors="replace").strip())[:160]
            record: dict[str, Any] = {"outcome": "crashed", "why": why}
            self.records[current or cases[0]] = record | ({"signal": -status} if status < 0 else {})

    def _over(self) -> dict[str, Any]:
        return {"outcome": "skipped", "why": f"{self.options.minutes:g} minutes were over"}

    def report(self) -> report.Report:
        """The report of what has been run so far."""
        cases: dict[str, dict[str, Any]] = {}
        for section, name in self.cases:
            record = self.records.get(
                (section, name), {"outcome": "skipped", "why": self.stopped or "not reached"}
            )
            cases.setdefault(section, {})[name] = record
        complete = not self.stopped and not any(
            "minutes" in record.get("why", "") for record in self.records.values()
        )
        head = {
            "schema": report.SCHEMA,
            "emulator": emulator_version(),
            "tables": tables.version(),
            "complete": complete,
        }
        return head | {"seconds": round(time.monotonic() - self.started), "cases": cases}


def _name(output: Path, result: report.Report) -> Path:
    """The report's name, with the clock of times of launches unless they are measured."""
    times = report.environment(result).get("times", "")
    if "launches" not in result["cases"] or times == "measured" or times in output.name:
        return output
    return output.with_name(f"{output.name}-{times}")


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if options.diff:
        ours, theirs = map(report.read, options.diff)
        comparison = diff.compare(ours, theirs)
        print(diff.text(ours, theirs, comparison))
        return 1 if comparison.disagreements else 0
    if options.check:
        bad = [
            f"{path}: {problem}"
            for path in options.check
            for problem in report.problems(report.parsed(path))
        ]
        print("\n".join(bad) or f"{len(options.check)} reports: correct")
        return 1 if bad else 0
    if options.timings:
        options.only += ",launches"
        options.minutes += 5
    run = Run(selected(options), options)
    if not os.access(folder := options.output.resolve().parent, os.W_OK):
        raise ValueError(f"--output: {folder} is not a directory that this user can write")
    try:
        run.everything()
    except KeyboardInterrupt:
        run.stopped = "stopped by ctrl-C"
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    first = run.records.get(("environment", "environment"), {})
    if not first.get("facts"):
        why = first.get("why") or first.get("error", {}).get("message") or run.stopped
        print(
            f"ascend-emulator verify: no NPU could be used: {why or 'no answer'}. It needs torch_npu 2.7 or later"
            " and an NPU; without one: ascend-emulator run -- ascend-emulator verify",
            file=sys.stderr,
        )
        return 2
    result = run.report()
    private = report.problems(result | {"checksum": report.checksum(result)})
    if unmarked := [problem for problem in private if problem.startswith("times are")]:
        print(f"ascend-emulator verify: {unmarked[0]}", file=sys.stderr)
        return 2
    output = _name(Path(str(options.output).removesuffix(".json")), result)
    Path(f"{output}.json").write_text(report.text(result))
    Path(f"{output}.md").write_text(markdown.text(result))
    print(markdown.summary(result))
    for problem in private:
        print(f"look at this before you send it: {problem}")
    print(
        f"\nWritten: {output}.json ({Path(f'{output}.json').stat().st_size / 1e3:.0f} kB) and"
        f" {output}.md.\nThey have versions, the chip's name and figures, results, times and error"
        " codes of the cases; no host names, user\nnames, paths or addresses. Read them, and send"
        " them as docs/verify.md says."
    )
    return 0
