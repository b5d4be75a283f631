# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run the cases of one unittest file in processes that may crash, and record each outcome (see
tools/upstream)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IMPORT = "(import)"
EXPECTED = "failed, as expected"
IDLE = "allocated nothing on the device"
START = 120  # Seconds until a file is imported, or the deadline of a case if that is longer.
REFUSED = re.compile(
    r"\b((?:acl|Hccl|hccl|rt|Atb)\w+) is not emulated|legacy graph operator '(\w+)'"
)
# Only the queue's thread knows the reason; with launches that block it arrives where it belongs.
ELSEWHERE = re.compile(
    r"failed earlier|arguments were refused|Inner error is reported|synchronize failed"
)
OTHER_CHIP = re.compile(
    r"[Oo]nly run on|910A|310P|[Aa]scend950|[Aa]scend910[_C]|\bA[235]\b|cann version", re.IGNORECASE
)


class File:
    """One test file and the processes that run its cases.

    Attributes:
        imports: whether the children that the file spawns import torch_npu themselves, rather than
            being forked from a server.
        cases: for each case its outcome (passed, failed, refused, other chip, skipped, crashed,
            timed out), the message and the names that refused.
        loaded: the file as a module that was imported before; its processes then go on behind a
            case that fails.
        chosen: with `loaded`, the cases to run; those in `cases` have been.
        unskip: cases that the file skips for a reason with this text are run.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        fresh: bool,
        deadline: float,
        logs: Path,
        imports: bool = False,
        loaded: types.ModuleType | None = None,
        chosen: Sequence[str] = (),
        cases: dict[str, dict] | None = None,
        unskip: str = "",
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.path, self.name, self.fresh, self.deadline = path, name, fresh, deadline
        self._imports, self._loaded, self._unskip = imports, loaded, unskip
        self.cases: dict[str, dict] = cases if cases is not None else {}
        self._log = logs / (name.replace("/", "-") + ".log")
        self._log.write_bytes(b"")
        self._known = list(chosen)
        self._process: subprocess.Popen | None = None
        # Run with blocking launches, to find the reason of their failure.
        self._again: list[str] = []
        self._start()

    def step(self) -> bool:
        """Read what the process has reported, and start the next when it is gone; true when all is
        done."""
        alive = self._read()
        if alive and time.monotonic() < self._until:
            return False
        if alive:
            self.kill()
            self._read()
        status = self._wait()
        if self._current or not self._listed:
            self._lost(timed_out=alive, status=status)
        elif not self._broken:
            # It ran to its end: the remaining cases were not run, for example because of
            # setUpClass.
            for case in self._left():
                self._record(case, "failed", f"not run: {self._trouble or 'no reason given'}")
        if not self._listed or (self._current is None and not self._broken and not self._again):
            return True
        if not self._left():
            if not self._again:
                return True
            self._start(blocking=True)
        else:
            self._start()
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def _left(self) -> list[str]:
        return [case for case in self._known if case not in self.cases]

    def _start(self, blocking: bool = False) -> None:
        reader, writer = os.pipe()
        only = list(self._again) if blocking else self._left() if self._loaded else None
        job = {
            "path": str(self.path),
            "done": [*self.cases],
            "only": only,
            "blocking": blocking,
            "unskip": self._unskip,
        }
        self._blocking = blocking
        with open(self._log, "ab") as log:
            if self.fresh:
                command = [
                    sys.executable,
                    __file__,
                    json.dumps({**job, "pipe": writer, "imports": self._imports}),
                ]
                where = tempfile.gettempdir()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writer],
                    start_new_session=True,
                    cwd=where,
                )
                self._pid, self._process = process.pid, process
            else:
                self._pid = _fork(job, reader, writer, log.fileno(), self._loaded)
        os.close(writer)
        os.set_blocking(reader, False)
        self._pipe, self._rest = reader, b""
        self._current: str | None = None
        self._listed = self._broken = False
        self._trouble = ""
        self._until = time.monotonic() + max(START, self.deadline)

    def _read(self) -> bool:
        """Take in reports; false when the process has closed its end."""
        while select.select([self._pipe], [], [], 0)[0]:
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                return False
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._report(json.loads(line))
        return True

    def _report(self, report: dict) -> None:
        self._until = time.monotonic() + self.deadline
        if "cases" in report:
            self._listed = True
            self._known = self._known or report["cases"]
        elif "start" in report:
            self._current = report["start"]
            if self._blocking:
                self._again.remove(self._current)
        elif "broken" in report:
            self._broken = True
        elif "trouble" in report:
            self._trouble = report["trouble"]
        else:
            self._current = None
            case, outcome, message = report["end"], report["outcome"], report["message"]
            if (
                outcome == "failed"
                and ELSEWHERE.search(message)
                and not self._blocking
                and not REFUSED.search(message)
            ):
                self._again.append(case)
            if not self._blocking or outcome == "failed":
                self._record(case, outcome, message, report["seconds"])

    def _lost(self, timed_out: bool, status: int) -> None:
        outcome = "timed out" if timed_out else "crashed"
        code = os.waitstatus_to_exitcode(status) if not self._process else status
        how = (
            f"after {self.deadline:g} s"
            if timed_out
            else (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        )
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        if REFUSED.search(tail) and self._current and not self._blocking:
            # torch_npu has thrown the refusal where C++ allows no exception.
            self._again.append(self._current)
        self._record(self._current or IMPORT, outcome, f"{how}\n{tail}")

    def _record(self, case: str, outcome: str, message: str = "", seconds: float = 0.0) -> None:
        names = sorted({first or second for first, second in REFUSED.findall(message)})
        if outcome == "failed" and names:
            outcome = "refused"
        if outcome == "skipped" and OTHER_CHIP.search(message):
            outcome = "other chip"
        self.cases[case] = {
            "outcome": outcome,
            "message": message,
            "refused": names,
            "seconds": round(seconds, 2),
        }

    def _wait(self) -> int:
        os.close(self._pipe)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if self._process:
                if self._process.poll() is not None:
                    break
            else:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self.kill()
                    return status
            time.sleep(0.01)
        self.kill()  # Also processes that it started and left running.
        return self._process.wait() if self._process else os.waitpid(self._pid, 0)[1]


def _fork(job: dict, reader: int, writer: int, log: int, loaded: types.ModuleType | None) -> int:
    """Start from this process, which has torch and torch_npu imported and no device opened."""
    if not loaded:
        _runners()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not loaded:
            os.chdir(tempfile.gettempdir())
        module = sys.modules["__main__"] = loaded or types.ModuleType("__main__")
        perform(module, job, writer, loaded is not None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def load(module: types.ModuleType, path: str, source: str, runners: list) -> None:
    """Execute the source of a test file as `module`; the runners' `run_tests` does nothing then."""
    sys.argv[:] = [path]
    sys.path.insert(0, os.path.dirname(path))
    for owner in runners:
        owner.run_tests = lambda *_, **__: None
    unittest.main = lambda *_, **__: None  # type: ignore[assignment]
    module.__file__, module.__spec__ = path, None
    exec(compile(source, path, "exec"), module.__dict__)


def perform(module: types.ModuleType, job: dict, pipe: int, loaded: bool = False) -> None:
    """Import the file as `module` and run its cases, reporting each through the pipe."""
    fcntl.fcntl(pipe, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job["blocking"]:
        os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    out = os.fdopen(pipe, "w", buffering=1)

    def report(**what: object) -> None:
        out.write(json.dumps(what) + "\n")

    started = time.monotonic()
    try:
        if job["unskip"]:
            _run_skipped(job["unskip"])
        if not loaded:
            load(module, job["path"], Path(job["path"]).read_text(), _runners())
            tests = _flat(unittest.defaultTestLoader.loadTestsFromModule(module))
        else:
            tests = [
                getattr(module, owner)(case)
                for owner, case in (name.split("::") for name in job["only"])
            ]
    except BaseException as error:
        report(cases=[IMPORT])
        outcome = (
            "skipped"
            if isinstance(error, (unittest.SkipTest, ModuleNotFoundError, SystemExit))
            else "failed"
        )
        report(
            end=IMPORT, outcome=outcome, message=_text(error), seconds=time.monotonic() - started
        )
        return
    report(cases=[_id(test) for test in tests])
    wanted = (
        job["only"]
        if job["only"] is not None
        else [_id(test) for test in tests if _id(test) not in set(job["done"])]
    )
    unittest.TestSuite(test for test in tests if _id(test) in set(wanted)).run(
        _Result(report, goes_on=loaded)
    )


def _run_skipped(text: str) -> None:
    """Make `unittest.skip` skip nothing for a reason with this text."""
    skip = unittest.skip
    unittest.skip = lambda reason: (lambda case: case) if text in reason else skip(reason)


def _runners() -> list:
    import torch.testing._internal.common_utils
    import torch_npu.testing.testcase

    return [torch.testing._internal.common_utils, torch_npu.testing.testcase]


def _flat(suite: unittest.TestSuite) -> list:
    return [
        case
        for test in suite
        for case in (_flat(test) if isinstance(test, unittest.TestSuite) else [test])
    ]


def _id(test: unittest.TestCase) -> str:
    return test.id().removeprefix("__main__.").replace(".", "::")


def _text(error: BaseException) -> str:
    """The error and its location in the test file, without CANN's log lines, which differ between
    runs."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next(
        (
            f"{Path(f.filename).name}:{f.lineno}: {f.line}"
            for beginning in ("test_", "")  # The file itself rather than unittest's or torch_npu's.
            for f in reversed(frames)
            if "test" in Path(f.filename).name and Path(f.filename).name.startswith(beginning)
        ),
        "",
    )
    text = re.sub(r"\[ERROR\] \d{4}-[^\n]*\n", "", str(error)).strip()
    text = text if len(text) < 2500 else text[:1200] + "\n...\n" + text[-1200:]
    cause = f"\ncaused by {_text(error.__cause__)}" if error.__cause__ else ""
    return f"{type(error).__name__}: {text}\n{where}{cause}".strip()


class _Environment:
    """Unpickles by making the environment what it was when this was pickled."""

    def __reduce__(self) -> tuple:
        return exec, (f"import os; os.environ.clear(); os.environ.update({dict(os.environ)!r})",)


def _spawn_from_server() -> None:
    """Fork the children that a file spawns from a server that has imported torch_npu, which saves
    seconds for each."""
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["forkserver"]
    prepare = multiprocessing.spawn.get_preparation_data
    # A spawned child has its parent's environment, a forked one the server's.
    multiprocessing.spawn.get_preparation_data = lambda name: {
        **prepare(name),
        "environment": _Environment(),
    }
    multiprocessing.forkserver.set_forkserver_preload(
        [
            "torch_npu.testing.testcase",
            "torch.testing._internal.common_distributed",
            "torch.distributed.fsdp",
        ]
    )
    multiprocessing.forkserver.ensure_running()


def _allocations() -> int:
    """How often this process has allocated memory on the device."""
    import torch

    if not torch.npu.is_initialized():
        return 0
    return torch.npu.memory_stats()["allocation.all.allocated"]


class _Result(unittest.TestResult):
    """Reports each case when it is over; the device's queue is empty by then, so that no failure is
    left to the next."""

    def __init__(self, report: Callable, goes_on: bool) -> None:
        super().__init__()
        self._report, self._goes_on = report, goes_on

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome, self._message, self._started = "passed", "", time.monotonic()
        self._allocated = _allocations()
        self._report(start=_id(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        broken = ""
        try:
            import torch

            if torch.npu.is_initialized():
                torch.npu.synchronize()
            if self._goes_on and self._outcome == "passed" and _allocations() == self._allocated:
                self._note("passed", self._message or IDLE)
        except Exception as error:
            broken = _text(error)
            if self._outcome == "passed":
                self._note("failed", f"after the case: {broken}")
        self._report(
            end=_id(test),
            outcome=self._outcome,
            message=self._message,
            seconds=time.monotonic() - self._started,
        )
        # A failure may leave memory, modes or streams behind.
        if broken or (self._outcome == "failed" and not self._goes_on):
            self._report(broken=True)
            self.stop()

    def addError(self, test: Any, err: Any) -> None:
        if not isinstance(test, unittest.TestCase):
            self._report(trouble=_text(err[1]))
        else:
            self._note("failed", _text(err[1]))

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note("failed", _text(err[1]))

    def addSkip(self, test: Any, reason: str) -> None:
        if not isinstance(test, unittest.TestCase):
            self._report(trouble=reason)
        elif self._outcome == "passed":
            self._note("skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._note("passed", f"{EXPECTED}: {_text(err[1])}")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note("failed", "succeeded, which was not expected")

    def _note(self, outcome: str, message: str) -> None:
        if self._outcome == "failed":
            return
        self._outcome, self._message = outcome, message


if __name__ == "__main__":
    _job = json.loads(sys.argv[1])
    del sys.path[0]
    if not _job.pop("imports"):
        _spawn_from_server()
    perform(sys.modules["__main__"], _job, _job.pop("pipe"))
