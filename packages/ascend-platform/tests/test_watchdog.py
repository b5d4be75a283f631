# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Watchdog: a process exits with its parent, and a remote worker exits with rank 0."""

import itertools
import subprocess
import sys
from pathlib import Path

import psutil
from harness.engines.ports import free_port

SCRIPT = """
import sys, time
import torch
from ascend_platform.process import watchdog

rank, port = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
if rank == "1":
    watchdog.exit_when_rank_0_exits()
print("ready", flush=True)
time.sleep(120)
"""

PARENT = """
import logging, multiprocessing, os, sys, time
from multiprocessing import connection
from ascend_platform.process import watchdog

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)

class WatchesWhenUnpickled:  # as an argument whose module activates the platform
    def __reduce__(self):
        return watchdog.exit_when_parent_exits, ()

def child(late, early):
    os.write(1, b"ready\\n")  # one write: lines of several processes stay apart
    while late and not connection.wait([multiprocessing.parent_process().sentinel]):
        pass
    if multiprocessing.current_process().name != "EngineCore_DP1":
        watchdog.exit_when_parent_exits()
    time.sleep(120)

if __name__ == "__main__":
    names = ("EngineCore_DP0", "EngineCore_DP1", "VllmWorker-0", "other")
    early = {"EngineCore_DP1": WatchesWhenUnpickled()}
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=child, name=name, args=(name == "VllmWorker-0", early.get(name))) for name in names]
    for process in processes:
        process.start()
    os.write(1, (" ".join(str(process.pid) for process in processes) + "\\n").encode())
    time.sleep(120)
"""


def test_engine_core_and_worker_exit_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert parent.stdout is not None
    lines = [
        line.strip() for line in itertools.islice(filter(None, map(text_of_line, parent.stdout)), 5)
    ]
    assert sorted(lines)[1:] == ["ready"] * 4
    engine, early, late, other = map(psutil.Process, map(int, sorted(lines)[0].split()))
    parent.kill()
    try:
        # Not an error: the parent may have ended as it should.
        line = f"INFO the parent process {parent.pid} has exited; terminating\n"
        assert line in iter(parent.stdout.readline, "")
        assert (
            psutil.wait_procs([engine, early, late], timeout=10)[1] == []
        )  # Early, late: before its parent is known, after its exit.
        assert other.is_running()  # not one of vLLM's
    finally:
        other.kill()
        parent.wait()


def text_of_line(line: str) -> str:
    """A line printed by the script, without the lines of libraries."""
    return line if line[0].isdigit() or line.startswith("ready") else ""


def test_worker_exits_with_rank_0() -> None:
    port = free_port()
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert any("ready" in line for line in rank.stdout or ())
        ranks[0].kill()
        output = ranks[1].communicate(timeout=20)[0]
        assert ranks[1].returncode == -15
        assert f"lost the connection to rank 0 (127.0.0.1 port {port})" in output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
