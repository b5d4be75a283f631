# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A pytest plugin: how `tools/test -n 2` distributes test files to processes, and which files take
the time; and failures as they happen."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController


WHOLE = ("ascend-emulator", "ascend-model-loader")
"""Packages whose tests all run in one process. The emulator's last test checks that every entry
point was called; the model loader's last test reads the results of a fuzzer that runs meanwhile."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """A file's tests go to one process, since they share engines. What takes long comes first: the
    emulator's, and the files that start engines. By default xdist begins with the files of most
    tests, and the longest, of one or two tests, are left for the end, when one process has nothing
    to do."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((package for package in WHOLE if f"/{package}/" in file), file)

        def _assign_work_unit(self, node: WorkerController) -> None:
            if not any(self.assigned_work.values()):  # the first: the queue is complete
                for file in [
                    file
                    for file in self.workqueue
                    if not file.startswith(("ascend-emulator", "tests/"))
                ]:
                    self.workqueue.move_to_end(file)
            super()._assign_work_unit(node)

    return ByFile(config, log)


_SECONDS: defaultdict[str, float] = defaultdict(float)
"""Of each file's tests and fixtures."""


class Failures:
    """Prints a failure when it happens: a run that its time limit ends prints no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            last = report.longreprtext.strip().rpartition("\n")[2]
            self._terminal.write_line("")
            self._terminal.write_line(f"FAILED {report.nodeid} ({report.when}): {last}")


@pytest.hookimpl(trylast=True)  # Pytest registers its reporter in this hook.
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(terminal))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slowest = sorted(((seconds, file) for file, seconds in _SECONDS.items()), reverse=True)[:20]
    if slowest and slowest[0][0] >= 60:
        terminalreporter.section("slowest files")
        for seconds, file in slowest:
            terminalreporter.write_line(f"{seconds:6.0f} s  {file}")
