# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The last line on the terminal of a `vllm serve` that fails or is ended: standard output and standard error together.

All cases, with the rows of the table in docs/doctor.md:
`PYTHONPATH=. ascend-emulator run -- python tests/e2e/test_failing_starts.py`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from harness import checkout
from harness.engines import npus
from harness.engines.launcher import shared_memory
from harness.engines.ports import free_port

VLLM = str(Path(sys.executable).parent / "vllm")
SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
STARTED = "Application startup complete"
ENGINE = "Initializing a V1 LLM engine"
TP2 = ["--tensor-parallel-size", "2"]
NODES = [
    *TP2,
    "--nnodes",
    "2",
    "--master-addr",
    "127.0.0.1",
    "--master-port",
    "{port}",
    "--distributed-timeout-seconds",
    "10",
]
WITHIN = 30.0  # Seconds from a signal to the exit: five on an idle machine; vLLM waits for 600.


class Case(NamedTuple):
    """A start: its options, the last line (a pattern), the exit status, and the signal sent to it
    or to a part of it."""

    options: list[str]
    last: str
    status: int = 1
    npus: int = 1
    model: Callable[[Path], None] = lambda directory: None
    variables: dict[str, str] = {}  # noqa: RUF012
    # Killed after this text or library; all processes ("") or the last of this name; by this
    # signal.
    kill: tuple[str, str, int] | None = None


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def _change(**changes: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return write


def _add_adapter(directory: Path) -> None:
    """An adapter of rank 32 in a folder of the model."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((directory / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = heads * config.get("head_dim", hidden // heads)
    adapter = directory / "adapter"
    adapter.mkdir()
    described = {
        "peft_type": "LORA",
        "r": 32,
        "lora_alpha": 32,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.zeros(32, hidden),
        f"{name}.lora_B.weight": torch.zeros(width, 32),
    }
    save_file(tensors, adapter / "adapter_model.safetensors")


KILLED = (
    r"was killed by SIGKILL \(signal 9\); fix: if no user killed it, the kernel did because memory"
    r" ran out"
)
CASES = {
    "a truncated checkpoint, two workers": Case(
        TP2,
        r"checkpoint file .*/model\.safetensors is incomplete or damaged \(.*\); fix: .*copy",
        npus=2,
        model=_truncate,
    ),
    "the engine core is killed while it starts": Case(
        [], f"EngineCore {KILLED}", kill=(ENGINE, "EngineCore", signal.SIGKILL)
    ),
    "ctrl-C while the engine starts": Case(
        TP2, "interrupted by SIGINT", 130, npus=2, kill=("rank=1 local_rank=1", "", signal.SIGINT)
    ),
}
SLOW_CASES = {
    "a peer that does not answer": Case(
        [*NODES, "--node-rank", "1", "--headless"],
        r"no answer from 127\.0\.0\.1 port \d+ in 10 s; fix: start vllm serve with --node-rank 0"
        r" there",
    ),
    "a peer that does not come": Case(
        [*NODES, "--node-rank", "0"],
        r"1 of 2 ranks joined.* in 1\d s; fix: start vllm serve --headless",
    ),
    "a length that memory cannot hold": Case(
        ["--max-model-len", "1000000"],
        r"a request of 1000000 tokens needs .* GiB of KV cache, and .* available; fix:"
        r" --max-model-len \d+",
        model=_change(max_position_embeddings=1000000),
    ),
    "a KV cache that memory cannot hold": Case(
        ["--kv-cache-memory-bytes", "64G"], r"out of memory.*; fix: lower .*--kv-cache-mem"
    ),
    "an adapter above its rank": Case(
        ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", "a={model}/adapter"],
        r"rank 32, and --max-lora-rank is 16; fix: --max-lora-rank 32",
        model=_add_adapter,
    ),
    "too few NPUs": Case(
        ["--tensor-parallel-size", "4"], r"4 NPUs|needs NPU.*2.*visible|; fix: ", npus=2
    ),
    "heads that do not divide": Case(
        ["--tensor-parallel-size", "3"], r"does not divide the model's 4 attention heads", npus=3
    ),
    "a directory too long for sockets": Case(
        [], r"TMPDIR: .* characters.*; fix: export VLLM_RPC_BASE_PATH", variables={"TMPDIR": "long"}
    ),
    "the engine core is killed while it serves": Case(
        [], f"EngineCore {KILLED}", kill=(STARTED, "EngineCore", signal.SIGKILL)
    ),
    "a worker is killed while it starts": Case(
        TP2,
        f"VllmWorker-1 {KILLED}",
        npus=2,
        kill=("rank=1 local_rank=1", "VLLM::Worker", signal.SIGKILL),
    ),
    "a worker is killed while it serves": Case(
        TP2, f"VllmWorker-1 {KILLED}", npus=2, kill=(STARTED, "VLLM::Worker", signal.SIGKILL)
    ),
    "a wrong option": Case(
        ["--additional-config", '{"ascend": {"patchez": {}}}'], "has no key 'patchez'"
    ),
    "an unknown quantization": Case(
        ["--quantization", "awqq"], "quantization method awqq is unknown; fix: correct or remove"
    ),
    "a checkpoint of an unknown quantization": Case(
        [], r"quantization", model=_change(quantization_config={"quant_method": "nobody's"})
    ),
    "SIGTERM while the engine starts": Case(
        TP2,
        "interrupted by SIGTERM",
        1,
        npus=2,
        kill=("rank=1 local_rank=1", "bin/vllm serve", signal.SIGTERM),
    ),
    "ctrl-C while modules are imported": Case(
        [], "interrupted by SIGINT", -signal.SIGINT, kill=("libtorch_cpu.so", "", signal.SIGINT)
    ),
}
"""Run by hand."""


def play(case: Case, patience: float = 400) -> dict[str, Any]:
    """The last line, exit status and output of a start, its seconds (of an end by a signal those
    after it), and what is left.

    Left are processes, files in its temporary directory, sockets among them, and shared memory that
    its processes have had open.
    """
    with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        model, temporary = directory / "model", directory / ("t" * 90 if case.variables else "t")
        shutil.copytree(checkout.ADDER, model)
        temporary.mkdir()
        case.model(model)
        fields = {"port": str(free_port()), "model": str(model)}
        options = [
            re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], option) for option in case.options
        ]
        command = [VLLM, "serve", str(model), "--port", str(free_port()), *SMALL, *options]
        environ = os.environ | {
            "TMPDIR": str(temporary),
            "PYTHONPATH": npus.path(),
            "OMP_NUM_THREADS": "1",
            "HCCL_BUFFSIZE": "16",
        }
        environ = {key: value for key, value in environ.items() if not key.startswith("VLLM_")} | {
            "VLLM_HOST_IP": "127.0.0.1"
        }
        if soc := environ.get("ASCEND_EMULATOR_SOC"):
            emulated = ["--npus", str(case.npus), "--soc", soc, "--memory", "1GiB"]
            command = [
                sys.executable,
                "-m",
                "ascend_emulator.cli",
                "run",
                *emulated,
                "--",
                *command,
            ]
        log, began = directory / "log", time.monotonic()
        with log.open("w") as out:
            process = psutil.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_listen,
            )
        shared: set[str] = set()
        try:
            since = _act(process, log, case.kill, patience, shared) if case.kill else began
            _wait(process, patience, shared)
            seconds = time.monotonic() - since
            left = _left(process.pid)
        finally:
            for each in _session(process.pid):
                each.kill()
        text = log.read_text()
        files = [
            file.name for file in temporary.iterdir() if not file.name.startswith("torchinductor")
        ]
        files += [name for name in shared if Path(name).exists()]
        return {
            "last": text.splitlines()[-1],
            "status": process.returncode,
            "seconds": seconds,
            "left": left + files,
            "text": text,
        }


def _listen() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background processes ignore it


def _act(
    process: psutil.Popen, log: Path, kill: tuple[str, str, int], patience: float, shared: set[str]
) -> float:
    """Wait for the text and send the signal; returns when."""
    text, name, number = kill
    deadline = time.monotonic() + patience
    while text not in log.read_text() and not _loaded(process, text):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
    shared |= shared_memory(_session(process.pid))
    if name:
        victims = [each for each in _session(process.pid) if name in " ".join(each.cmdline())]
        victims[-1].send_signal(number)
    else:
        os.killpg(process.pid, number)  # as a terminal does
    return time.monotonic()


def _loaded(process: psutil.Popen, library: str) -> bool:
    """Whether the command itself, rather than the emulator that becomes it, has loaded a
    library."""
    with contextlib.suppress(OSError, psutil.Error):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return any(word.endswith("/vllm") for word in process.cmdline()[:2]) and library in maps
    return False


def _wait(process: psutil.Popen, patience: float, shared: set[str]) -> None:
    deadline = time.monotonic() + patience
    while process.poll() is None:
        assert time.monotonic() < deadline, f"not ended after {patience:g} s"
        shared |= shared_memory(_session(process.pid))
        time.sleep(0.1)


def _session(leader: int) -> list[psutil.Process]:
    pids = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return sorted(pids, key=lambda each: each.create_time())


def _left(leader: int) -> list[str]:
    """Processes that live for more than ten seconds after the command."""
    deadline = time.monotonic() + 10
    while _session(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [" ".join(process.cmdline()) for process in _session(leader)]


def problems(case: Case, output: dict[str, Any]) -> list[str]:
    """Errors of a start."""
    wrong = []
    if not re.match(r"(ascend-platform|vllm): ", output["last"]) or not re.search(
        case.last, output["last"]
    ):
        wrong.append(f"last line: {output['last']}")
    if output["status"] != case.status:
        wrong.append(f"status {output['status']}")
    if output["left"]:
        wrong.append(f"left: {output['left']}")
    if case.kill and case.kill[2] != signal.SIGKILL:
        wrong += ["a traceback"] * ("Traceback" in output["text"])
        wrong += [f"{output['seconds']:.1f} s"] * (output["seconds"] > WITHIN)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_last_line_says_what_was_found_and_what_to_do(name: str) -> None:
    result = play(CASES[name])
    assert problems(CASES[name], result) == [], result["text"][-4000:]


if __name__ == "__main__":
    for name, case in (CASES | SLOW_CASES).items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        result = play(case)
        left = ", ".join(result["left"]) or "nothing"
        print(
            f"| {name} | `{result['last']}` | {result['seconds']:.0f} | {result['status']} | {left} |",
            flush=True,
        )
        for problem in problems(case, result):
            print("WRONG:", problem, flush=True)
        if os.environ.get("STARTS_LOGS"):
            Path(os.environ["STARTS_LOGS"], f"{name}.log").write_text(result["text"])
