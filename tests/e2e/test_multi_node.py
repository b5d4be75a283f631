# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm serve` on one and on several machines, with vLLM's own launcher and with Ray, also when a
part is killed.

The machines are processes of this one, each with an address of its own (127.0.0.2, 127.0.0.3) and
an NPU of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = pytest.mark.slow
# the former from vLLM 0.33 on
DEATH_MESSAGE = getattr(EngineDeadError, "CLIENT_MESSAGE", "EngineCore encountered an issue")
PROGRAM = checkout.PROGRAMS / "start_servers.py"
COMMANDS = Path(sys.executable).parent
SERVE = [
    str(COMMANDS / "vllm"),
    "serve",
    str(layouts.ADDER),
    "--served-model-name",
    "m",
    "--host",
    "127.0.0.1",
    "--port",
    "{port}",
]
SERVE += [
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "256",
    "--gpu-memory-utilization",
    "0.3",
]
TP2 = ["--tensor-parallel-size", "2"]
NODES = ["--nnodes", "2", "--master-addr", "127.0.0.2", "--master-port", "{other}"]
DATA_PARALLEL = [
    "--data-parallel-size",
    "2",
    "--data-parallel-size-local",
    "1",
    "--data-parallel-address",
    "127.0.0.2",
]
DATA_PARALLEL += ["--data-parallel-rpc-port", "{other}"]
RAY = ["--distributed-executor-backend", "ray"]


def machine(number: int, *command: str, npus: str = "", **variables: str) -> dict[str, Any]:
    """A machine with these NPUs, by default the one of its number."""
    address = f"127.0.0.{number + 2}"
    environ = {"RAY_AUTH_MODE": "disabled", "VLLM_HOST_IP": address, "HCCL_IF_IP": address}
    environ["ASCEND_RT_VISIBLE_DEVICES"] = npus or str(number)
    # Within one host the emulator uses Unix sockets.
    return {
        "command": [*command],
        "environ": environ | {"ASCEND_EMULATOR_HCCL_TRANSPORT": "tcp"} | variables,
    }


def ray_node(number: int, *options: str, npus: str = "", hidden: bool = False) -> dict[str, Any]:
    """A node of Ray. A hidden one shares no temporary directory with the others."""
    small = [
        "--num-cpus",
        "1",
        "--object-store-memory",
        "80000000",
        "--disable-usage-stats",
        "--temp-dir",
        "{directory}/r",
    ]
    command = [
        str(COMMANDS / "ray"),
        "start",
        "--block",
        "--node-ip-address",
        f"127.0.0.{number + 2}",
        *small,
        *options,
    ]
    hides = ["{directory}/0", "{directory}/2", "{directory}/r"] if hidden else []
    return machine(number, *command, npus=npus) | {"ready": "Ray runtime started", "hides": hides}


def two_nodes(npus: tuple[str, str], *options: str, hidden: bool = False) -> list[dict[str, Any]]:
    return [
        ray_node(0, "--head", "--port", "{other}", "--include-dashboard=false", npus=npus[0]),
        ray_node(1, "--address", "127.0.0.2:{other}", npus=npus[1], hidden=hidden),
        machine(0, *SERVE, *options, *RAY, npus=npus[0], RAY_ADDRESS="127.0.0.2:{other}"),
    ]


CASES: dict[str, dict[str, Any]] = {
    "one machine": {"machines": [{"command": [*SERVE, *TP2]}], "kill": "VLLM::Worker"},
    "two nodes of Ray": {"machines": two_nodes(("0", "1"), *TP2), "kill": 1},
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "two machines": {
        "machines": [
            machine(1, *SERVE, *TP2, *NODES, "--node-rank", "1", "--headless"),
            machine(0, *SERVE, *TP2, *NODES, "--node-rank", "0"),
        ],
        "kill": 0,
    },
    "two machines, data parallel": {
        "machines": [
            machine(1, *SERVE, *DATA_PARALLEL, "--data-parallel-start-rank", "1", "--headless"),
            machine(0, *SERVE, *DATA_PARALLEL),
        ],
    },
    "Ray on one machine": {
        "machines": [{"command": [*SERVE, *TP2, *RAY], "environ": {"RAY_AUTH_MODE": "disabled"}}],
        "kill": "ray::RayWorkerProc",
    },
    "one machine, the API server dies": {
        "machines": [{"command": [*SERVE, "--enforce-eager"]}],
        "kill": "bin/vllm serve",
    },
}
MORE_CASES["two nodes of Ray, TP2 PP2"] = {
    "machines": two_nodes(("0,1", "2,3"), *TP2, "--pipeline-parallel-size", "2", hidden=True),
    "kill": 1,
}
MORE_CASES["two nodes of Ray, TP2 PP2, a worker dies"] = MORE_CASES["two nodes of Ray, TP2 PP2"] | {
    "kill": "ray::RayWorkerProc"
}
for name in ("two machines", "two machines, data parallel"):
    headless, server = MORE_CASES[name]["machines"]
    MORE_CASES[f"{name}, no shared directory"] = MORE_CASES[name] | {
        "machines": [headless | {"hides": ["{directory}/1"]}, server]
    }
MORE_CASES["two machines, TP2 PP2"] = {
    "machines": [
        machine(
            1,
            *SERVE,
            *TP2,
            "--pipeline-parallel-size",
            "2",
            *NODES,
            "--node-rank",
            "1",
            "--headless",
            npus="2,3",
        ),
        machine(
            0, *SERVE, *TP2, "--pipeline-parallel-size", "2", *NODES, "--node-rank", "0", npus="0,1"
        ),
    ],
    "kill": 0,
}
MORE_CASES["two machines, idle, rank 0's dies"] = MORE_CASES["two machines"] | {
    "kill": 1,
    "idle": True,
}
"""Run by hand: `PYTHONPATH=. ascend-emulator run -- python tests/e2e/test_multi_node.py NAME…`.
"""


def play(name: str) -> dict[str, Any]:
    """Results of start_servers.py for one case."""
    asked, lengths = layouts.prompts(
        json.loads((layouts.ADDER / "config.json").read_text())["vocab_size"]
    )
    case = {"name": name, "prompts": asked, "lengths": lengths} | (CASES | MORE_CASES)[name]
    variables: dict[str, Any] = {
        "VLLM_PLUGINS": "",
        "VLLM_RPC_BASE_PATH": "",
        "RAY_ADDRESS": "",
        "OMP_NUM_THREADS": "1",
    }
    done = npus.run(4, sys.executable, str(PROGRAM), json.dumps([case]), **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = npus.results(done.stdout)
    return dict(record)


def can_hide() -> bool:
    """Whether this user may create mount namespaces."""
    return (
        os.geteuid() == 0
        and subprocess.run(
            ["unshare", "--mount", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.parametrize("name", CASES)
def test_tokens_match_transformers_and_a_killed_rank_fails(name: str) -> None:
    if any(machine.get("hides") for machine in CASES[name]["machines"]) and not can_hide():
        pytest.skip(
            "machines with directories of their own need the right to create mount namespaces"
        )
    actual = play(name)
    assert "failed" not in actual, actual["failed"]
    count, mismatches, _, mean = layouts.compare(layouts.ADDER, "bfloat16", actual["results"])
    assert (count, mismatches) == (33, 0)
    assert mean < 0.01
    if "kill" in CASES[name]:
        assert DEATH_MESSAGE in actual["said"]
        assert actual["answered"] < 30
        assert actual["gone"] < 30
        assert actual["codes"][-1] == 1
        assert 0 not in actual["codes"]
        assert [actual["left"], actual["shared"], actual["files"]] == [[], [], []]


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES | MORE_CASES:
        result = play(case)
        results = result.pop("results", None)
        compared = layouts.compare(layouts.ADDER, "bfloat16", results) if results else "no answers"
        print(case, compared, json.dumps(result), flush=True)
