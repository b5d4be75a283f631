# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Processes of Ray: what they get from another machine, and what they leave when they
are killed."""

import os
import subprocess
import sys
import time
from pathlib import Path


def test_ray_worker_replaces_the_directory_of_another_machine(tmp_path):
    script = (
        "import os, sys; sys.modules['ray'] = None; from ascend_platform.process import sockets; "
    )
    script += "sockets.replace_foreign_directory(); print(os.environ['VLLM_RPC_BASE_PATH']); "
    script += (
        "print(os.path.isdir(os.environ['VLLM_RPC_BASE_PATH']), flush=True);"
        " os.kill(os.getpid(), 9)"
    )
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)  # another user's may have any content
    for given, kept in ((tmp_path, True), (tmp_path / "elsewhere", False), (shared, False)):
        environ = os.environ | {"TMPDIR": str(tmp_path), "VLLM_RPC_BASE_PATH": str(given)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
        )
        used, exists = done.stdout.split()[-2:]
        assert (used == str(given), exists) == (kept, "True"), done.stderr
        deadline = time.monotonic() + 60
        while not kept and Path(used).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_shared_memory_of_a_killed_ray_worker_is_removed(tmp_path):
    script = (
        "import os, sys; from multiprocessing.shared_memory import SharedMemory; sys.modules['ray']"
        " = None; "
    )
    script += "from ascend_platform.process import ray; ray.keep_resource_tracker(); "
    script += "print(SharedMemory(create=True, size=8).name, flush=True); os.killpg(0, 9)"
    command = [sys.executable, "-c", script]
    with (tmp_path / "out").open("w+") as out:  # The tracker would hold a pipe open.
        subprocess.run(
            command, stdout=out, stderr=out, start_new_session=True, timeout=120, check=False
        )
        out.seek(0)
        segment = Path("/dev/shm", out.read().split()[0])
    deadline = time.monotonic() + 60
    while segment.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
