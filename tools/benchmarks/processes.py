# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Processes of tools/bench, each with the vLLM of one side."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
from pathlib import Path

ENGINE = Path(__file__).with_name("engine.py")
START = 600  # Seconds to load an engine; 60 on two idle cores.
ANSWER = 300  # Seconds for one measurement; 10 on two idle cores.


class Trouble(Exception):
    """A side did not do its part; the message is one line."""


class Engine:
    """A process with one side's vLLM in it (benchmarks/engine.py), in a process group of
    its own."""

    def __init__(
        self, name: str, command: list, options: dict, variables: dict[str, str], directory: Path
    ) -> None:
        self.name, self.log = name, directory / f"{name}.log"
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), str(ENGINE), json.dumps(options)],
                env={**quiet, **variables},
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            answer = self._answer(START)
            self.ready, self.versions = answer["ready"], answer["versions"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def measure(self, question: dict) -> dict:
        """The engine's answer to a question of benchmarks/engine.py.

        Raises:
            Trouble: the process ended, or the deadline passed.
        """
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self._answer(ANSWER)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _answer(self, deadline: float) -> dict:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], deadline)[0]:
            raise Trouble(f"{self.name}: nothing within {deadline} s; its log is {self.log}")
        if line := self.process.stdout.readline():
            return json.loads(line)
        lines = self.log.read_text(errors="replace").splitlines()
        reason = next(
            (line for line in reversed(lines) if re.search(r"\w(Error|Exception)\b|: error", line)),
            "",
        )
        raise Trouble(
            f"{self.name}: ended with exit code {self.process.wait(60)}; {reason.strip()[:300]}"
            f" (log: {self.log})"
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
