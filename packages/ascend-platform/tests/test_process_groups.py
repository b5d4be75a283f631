# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A rank that exits while another one hangs: its exit is bounded. Pipeline stages that schedule by
their own caches."""

import sys
from types import SimpleNamespace

import pytest
import torch
from ascend_platform import extension
from ascend_platform.worker import process_groups
from harness.engines import npus
from harness.engines.ports import free_port
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

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
    port = free_port()
    done = npus.run(2, sys.executable, "-c", SCRIPT, str(port), VLLM_PLUGINS="", timeout=300)
    assert "exits" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "destroying the process groups timed out after 2 s" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("executor", ["external_launcher", "mp"])
@pytest.mark.parametrize("other", ["attention and states", "states"])
def test_stages_without_attention_are_refused_by_the_launcher(executor, other, monkeypatch):
    def gather(stages, rank_value, group):
        stages[:] = [other, rank_value]

    monkeypatch.setattr(
        process_groups, "get_pp_group", lambda: SimpleNamespace(world_size=2, cpu_group=None)
    )
    monkeypatch.setattr(process_groups.dist, "all_gather_object", gather)
    specs = [
        FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16),
        MambaSpec(block_size=128, shapes=((3, 40),), dtypes=(torch.float32,)),
    ]
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=executor))
    if executor == "mp" or other != "states":
        process_groups.check_stages(config, specs)
        return
    refused = r"have states, attention and states: .*; fix: --distributed-executor-backend mp"
    with pytest.raises(extension.RefusedError, match=refused):
        process_groups.check_stages(config, specs)
