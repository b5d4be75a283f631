"""A worker on another machine ends when rank 0's process is gone."""

import socket
import subprocess
import sys

SCRIPT = """
import sys, time
import torch
from ascend_platform import watch

rank, port = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
if rank == "1":
    watch.end_with_rank_0()
print("ready", flush=True)
time.sleep(120)
"""


def test_worker_ends_with_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert any("ready" in line for line in rank.stdout or ())
        ranks[0].kill()
        said = ranks[1].communicate(timeout=20)[0]
        assert ranks[1].returncode == -15
        assert f"the connection to rank 0 (127.0.0.1 port {port}) has ended" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
