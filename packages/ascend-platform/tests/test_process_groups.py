"""A rank that exits while another one hangs: its exit is bounded."""

import socket
import sys

from harness import npus

SCRIPT = """
import atexit, ctypes, os, signal, sys
import torch, torch_npu
import torch.distributed as dist
from ascend_platform.worker import process_groups

process_groups.DESTROY_SECONDS = 2
port, child = int(sys.argv[1]), os.fork()
rank = int(child == 0)
torch.npu.set_device(rank)
dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.ones(4).npu()
dist.all_reduce(x)
torch.npu.synchronize()
dist.all_reduce(torch.ones(1))
if rank:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
atexit.register(process_groups.destroy)
dist.all_reduce(x)  # rank 1 never takes part
print("exits", flush=True)
"""


def test_exit_beside_a_rank_that_hangs_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = npus.run(2, sys.executable, "-c", SCRIPT, str(port), VLLM_PLUGINS="", timeout=300)
    assert "exits" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the process groups could not be destroyed in 2 s" in done.stderr
    assert done.returncode == 1
