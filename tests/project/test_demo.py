# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""tools/demo, as a newcomer runs it."""

import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import checkout

pytestmark = pytest.mark.slow
DEMO = [str(checkout.TOOLS / "demo")]


@pytest.fixture
def demo_environment() -> Iterator[dict[str, str]]:
    """Environment variables that mark every process of the demo; after the test no marked process
    may be left."""
    mark = f"DEMO_TEST={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    yield os.environ | {name: value}
    assert processes(mark) == []


def processes(mark: str) -> list[str]:
    """Command lines of the live processes that carry the mark in their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                pids.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # It has exited, or belongs to another user.
    return pids


def test_answers_are_right_and_the_log_shows_the_plugin(demo_environment: dict[str, str]) -> None:
    variables = demo_environment | {"VLLM_LOGGING_LEVEL": "DEBUG"}
    done = subprocess.run(
        DEMO, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    for line in (
        "Available plugins for group vllm.platform_plugins:",
        "- ascend -> ascend_platform:register",
        "Platform plugin ascend is activated",
        "12+34= 46",
        "86+77= 163",
    ):
        assert line in lines
    assert any(line.startswith("5/5 answers correct") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process(
    demo_environment: dict[str, str], number: signal.Signals
) -> None:
    # Tests that a shell started in the background ignore SIGINT, and so would their children.
    options = {"preexec_fn": functools.partial(signal.signal, number, signal.SIG_DFL)}
    with subprocess.Popen(
        DEMO,
        env=demo_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as demo:
        mark = f"DEMO_TEST={demo_environment['DEMO_TEST']}"
        deadline = time.monotonic() + 120
        while not any(
            "vllm serve" in command or "bin/vllm" in command for command in processes(mark)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(2)
        os.kill(demo.pid, number)
        output = demo.communicate(timeout=300)[0]
    assert demo.returncode == (130 if number == signal.SIGINT else 1), output


def test_server_that_fails_is_reported_in_one_line(demo_environment: dict[str, str]) -> None:
    done = subprocess.run(
        DEMO,
        env=demo_environment | {"VLLM_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "demo: the server ended with exit code 1" in done.stderr
    assert "VLLM_PLUGINS=ascend" in done.stderr
