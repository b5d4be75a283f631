# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The interpreter that starts with ``vllm serve`` and becomes its engine core: when it is used,
what it takes over, and its end. The command is a script of that name, which spawns processes; vLLM
is not imported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ascend_platform import host

pytestmark = pytest.mark.skipif(host.usable_cpus() < 2, reason="the interpreter needs a second CPU")

CHILD = """
import json, os, resource, sys, threading

def report(queue, path):
    tracker = sys.modules["multiprocessing.resource_tracker"]._resource_tracker
    found = {
        "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "path": sys.path,
        "directory": os.getcwd(), "variables": dict(os.environ), "tracker": tracker._fd,
        "early": "ascend_platform.process.waiting_engine" in sys.modules,
        "open": sorted(map(int, os.listdir("/proc/self/fd"))),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "threads": [thread.name for thread in threading.enumerate()],
        "sent": queue.get(timeout=20),
    }
    with open(path, "w") as file:
        json.dump(found, file)
    print("printed by the child process", flush=True)
    sys.exit(3)
"""
SPAWN = """
import multiprocessing, os, resource, sys
import child
if __name__ == "__main__":
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 1, limit[1]))
    os.environ["VLLM_RPC_BASE_PATH"] = "/a/directory"
    {change}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for index, name in enumerate({names}):
        process = context.Process(target=child.report, args=(queue, f"{{index}}.json"), name=name)
        process.start()
        queue.put("sent by the parent process")
        process.join(30)
        print("process", process.pid, process.exitcode, flush=True)
"""


@pytest.fixture
def serve(tmp_path):
    """A function that starts a script as ``vllm serve``, with a module ``vllm`` that cannot be
    imported."""
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "vllm.py").write_text("raise ImportError('no vLLM in this test')")
    (tmp_path / "bin" / "child.py").write_text(CHILD)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_RPC_BASE_PATH", "VLLM_ASCEND_STARTUP_CHECKS")
    }
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(tmp_path / "lib"), os.environ.get("PYTHONPATH")])
    )

    def start(script, *arguments, **more):
        (tmp_path / "bin" / "vllm").write_text(script)
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "bin" / "vllm"), *arguments],
            cwd=tmp_path,
            env=variables | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def children(pid, word):
    """Process ids of the children of a process whose command has a word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == pid and word in command:
            found.append(int(entry.name))
    return found


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def finish(process):
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors[-2000:]
    return out


def reports(tmp_path):
    return [json.loads(file.read_text()) for file in sorted(tmp_path.glob("[0-9].json"))]


def spawned(serve, tmp_path, change="pass", names=("EngineCore",), **variables):
    script = SPAWN.format(change=change, names=tuple(names))
    out = finish(serve(script, "serve", "model", **variables))
    return out, reports(tmp_path)


def test_engine_core_has_the_state_of_a_spawned_process(serve, tmp_path):
    out, (early,) = spawned(serve, tmp_path)
    assert early["early"]
    assert out.splitlines() == ["printed by the child process", f"process {early['pid']} 3"]
    _, (plain,) = spawned(serve, tmp_path, VLLM_ASCEND_STARTUP_CHECKS="0")
    assert not plain["early"]
    del plain["variables"]["VLLM_ASCEND_STARTUP_CHECKS"]
    own = {"pid", "parent", "early", "open", "tracker"}
    assert {name: early[name] for name in early.keys() - own} == {
        name: plain[name] for name in plain.keys() - own
    }
    assert len(early["open"]) == len(plain["open"])
    assert early["tracker"] in early["open"]


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'",
        "del os.environ['PYTHONPATH']",
        "sys.path.insert(0, '/another/folder')",
        "os.chdir('bin')",
        "os.umask(0o027)",
        "import ctypes; ctypes.CDLL(None).setenv(b'A_NAME', b'set by a library', 1)",
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "files = [open(os.devnull) for _ in range(300)]",
    ],
)
def test_in_another_state_a_new_interpreter_is_started(serve, tmp_path, change):
    _, found = spawned(serve, tmp_path, change)
    (found,) = found or [json.loads((tmp_path / "bin" / "0.json").read_text())]
    assert not found["early"]
    assert found["sent"] == "sent by the parent process"


def test_only_the_first_process_is_replaced(serve, tmp_path):
    _, found = spawned(serve, tmp_path, names=["EngineCore", "EngineCore"])
    assert [each["early"] for each in found] == [True, False]
    _, found = spawned(serve, tmp_path, names=["DPCoordinator", "EngineCore"])
    assert [each["early"] for each in found] == [False, False]


SLEEP = "import time; print('started', flush=True); time.sleep({seconds})"
WAITING = "waiting_engine"


def test_unused_interpreter_ends_with_the_command(serve):
    process = serve(SLEEP.format(seconds=5), "serve", "model")
    (pid,) = wait_for(lambda: children(process.pid, WAITING))
    assert finish(process) == "started\n"
    assert not Path(f"/proc/{pid}").exists()  # No zombie is left for init either.


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_interpreter_ends_with_a_killed_command(serve, number):
    process = serve(SLEEP.format(seconds=60), "serve", "model")
    (pid,) = wait_for(lambda: children(process.pid, WAITING))
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert wait_for(lambda: is_gone(pid))


def test_dead_interpreter_is_replaced_by_a_new_one(serve, tmp_path):
    kill = (
        "import signal, subprocess; subprocess.run(['pkill', '-KILL', '-P', str(os.getpid()), '-f',"
        " 'waiting_engine'])"
    )
    _, (found,) = spawned(serve, tmp_path, kill)
    assert not found["early"]


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["serve", "--help"], {}),
        (["bench", "serve"], {}),
        (["--help"], {}),
        (["serve", "model", "--headless"], {}),
        (["serve", "model", "--api-server-count=2"], {}),
        (["serve", "model", "-dp", "2"], {}),
        (["serve", "model"], {"VLLM_ASCEND_STARTUP_CHECKS": "0"}),
        (["serve", "model"], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    ],
)
def test_other_commands_start_no_interpreter(serve, words, variables):
    process = serve(SLEEP.format(seconds=0.5), *words, **variables)
    assert process.stdout.readline() == "started\n"
    assert children(process.pid, WAITING) == []
    assert children(process.pid, "resource_tracker") == []
    finish(process)


def test_with_one_cpu_no_interpreter_is_started(serve):
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cpus)])
    try:
        process = serve(SLEEP.format(seconds=0.5), "serve", "model")
    finally:
        os.sched_setaffinity(0, cpus)
    assert process.stdout.readline() == "started\n"
    assert children(process.pid, WAITING) == []
    finish(process)
