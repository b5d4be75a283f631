# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Errors of vLLM, torch and safetensors as they raise them, explained in one line; and causes from
a process to its parent."""

import datetime
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from ascend_cli.diagnostics import failures
from ascend_cli.diagnostics.explanations import death, describe, explain
from ascend_platform.errors import RefusedError
from ascend_platform.platform import NPUPlatform
from ascend_platform.plugins import requirements
from harness.engines import scripts
from harness.engines.configuration import engine_config
from harness.models import small as small_models
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

INTERRUPTED = """
import os, signal, sys, threading
from vllm.logger import init_logger
from ascend_cli.diagnostics import failures

def end(number, frame):  # as that of WorkerProc.worker_main
    raise SystemExit

signal.signal(signal.SIGINT, end)
failures.watch()
timer = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
try:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:12171")
except Exception:
    init_logger("vllm.v1.executor").exception("WorkerProc failed to start.")
    sys.exit(1)
"""
CHILD = """
import logging, multiprocessing, os, sys
from ascend_cli.diagnostics import failures
log = logging.getLogger("vllm.v1")

def worker(fails):
    failures.watch()
    try:
        raise fails
    except Exception:
        log.exception("WorkerProc failed to start.")

def core(errors):
    failures.watch()
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=[error], name=f"VllmWorker-{rank}") for rank, error in enumerate(errors)]
    for each in workers:
        each.start()
        each.join()
    try:
        raise Exception("WorkerProc initialization failed due to an exception in a background process.")
    except Exception:
        log.exception("EngineCore failed to start.")

if __name__ == "__main__":
    errors = [ValueError("lost the peer\\nin two lines"), RuntimeError("3 NPUs are needed; fix: list more")]
    process = multiprocessing.get_context("spawn").Process(target=core, args=[errors[:int(sys.argv[1])]], name="EngineCore")
    process.start()
    process.join()
    print(failures.cause())
    print(os.listdir(os.environ["VLLM_RPC_BASE_PATH"]))
"""


@pytest.fixture
def model(tmp_path):
    tmp_path.joinpath("config.json").write_text(json.dumps(small_models.TINY))
    return str(tmp_path)


def error_of(work, *arguments, **options):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work(*arguments, **options)
    return caught.value


def test_heads_that_do_not_divide(model):
    line = explain(error_of(engine_config, model, tensor_parallel_size=3))
    assert (
        line
        == "--tensor-parallel-size 3 does not divide the model's 4 attention heads; fix: choose one"
        " of 1, 2, 4"
    )


def test_unknown_quantization_names_the_supported_ones(model):
    line = explain(error_of(engine_config, model, quantization="awqq"))
    assert line.startswith(
        "quantization method awqq is unknown; fix: correct or remove --quantization (supported: "
    )
    assert "compressed-tensors" in line


def test_refusal_of_a_ray_worker_is_its_message():
    exceptions = pytest.importorskip("ray.exceptions")
    text = (
        "ray::RayWorkerProc.initialize_worker()\n  File worker.py\n    raise\n   "
        " ^^^^^\nRefusedError: too large; fix: less\n"
    )
    error = exceptions.RayTaskError(
        "initialize_worker", text, RefusedError("too large; fix: less")
    ).as_instanceof_cause()
    assert explain(error) == "too large; fix: less"


def test_other_configuration_errors_do_not_mention_pydantic(model):
    error = error_of(engine_config, model, max_model_len=10**9)
    assert explain(error) == ""
    line = describe(error)
    assert line.startswith("User-specified max_model_len (1000000000) is greater than")
    assert "\n" not in line


def test_truncated_checkpoint_is_named(tmp_path):
    from safetensors.torch import save_file
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1000)}, file)
    os.truncate(file, 2000)
    line = explain(
        error_of(lambda: list(safetensors_weights_iterator([str(file)], use_tqdm_on_load=False)))
    )
    assert line.startswith(f"checkpoint file {file} is incomplete or damaged (")
    assert "; fix: " in line


def test_peers_that_do_not_meet():
    store, second = torch.distributed.TCPStore, datetime.timedelta(seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    line = explain(error_of(store, "127.0.0.1", free, 2, False, second))
    assert line.startswith(
        f"no answer from 127.0.0.1 port {free} in 1 s; fix: start vllm serve with --node-rank 0"
        " there"
    )
    line = explain(error_of(store, "127.0.0.1", 0, 2, True, second))
    assert line.startswith("1 of 2 ranks joined")
    assert "; fix: start vllm serve --headless" in line


def test_memory_that_the_npu_does_not_have():
    line = explain(error_of(torch.empty, 1 << 50, dtype=torch.int8, device="npu"))
    assert line.startswith("NPU out of memory. Tried to allocate 1048576.00 GiB")
    assert "; fix: lower --gpu-memory-utilization, --kv-cache-memory-bytes" in line


@pytest.mark.parametrize(
    ("longest", "fix"),
    [(400, "--max-model-len 400, or raise"), (0, "lower --max-model-len, or raise")],
)
def test_length_that_memory_cannot_hold(longest, fix):
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    line = explain(
        error_of(
            _check_enough_kv_cache_memory, 1 << 30, lambda: 3 << 30, 1000, lambda available: longest
        )
    )
    assert line.startswith(
        f"a request of 1000 tokens needs 3.0 GiB of KV cache, and 1.0 GiB are available; fix: {fix}"
    )


@pytest.mark.parametrize("given", [100, None])
def test_cache_that_does_not_fit_names_the_option_that_was_set(model, given):
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    # vLLM's functions that call it have the configuration under this name.
    def check(vllm_config, available):
        _check_enough_kv_cache_memory(available, lambda: 3 << 30, 1000, lambda available: 0)

    option = f"--kv-cache-memory-bytes, which is {given}" if given else "--gpu-memory-utilization"
    config = engine_config(model, kv_cache_memory_bytes=given)
    assert explain(error_of(check, config, 0)).startswith(
        f"no memory is left for the KV cache; fix: raise {option}, "
    )
    assert f"fix: lower --max-model-len, or raise {option}, " in explain(
        error_of(check, config, 100)
    )


def test_architecture_whose_package_is_not_installed():
    # In a process of its own, where no other test has imported torchvision.
    program = """
import sys
import vllm
from ascend_cli.diagnostics.explanations import explain
sys.modules["torchvision"] = None
text = "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected. Please check the logs"
print("LINE", explain(ValueError(text + " for details.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    pin = f"'torch=={version('torch').partition('+')[0]}'"
    index = "--index-url https://download.pytorch.org/whl/cpu"
    vision = requirements.built_for_torch("torchvision", version("torch").partition("+")[0])
    fix = f"pip install --upgrade {vision} {pin} {index}"
    line = f"LINE Qwen3_5ForCausalLM needs torchvision, which is not installed; fix: {fix}"
    assert line in done.stdout.splitlines()


def test_adapter_above_its_rank():
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict({"r": 32, "lora_alpha": 32, "target_modules": ["q_proj"]})
    line = explain(error_of(helper.validate_legal, LoRAConfig(max_lora_rank=16)))
    assert line == "an adapter has rank 32, and --max-lora-rank is 16; fix: --max-lora-rank 32"


@pytest.mark.parametrize(
    ("number", "hint"),
    [(signal.SIGKILL, "memory"), (signal.SIGBUS, "/dev/shm"), (signal.SIGSEGV, "env")],
)
def test_killed_process_is_described_by_its_signal(number, hint):
    status = subprocess.run(
        [sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {number})"], check=False
    ).returncode
    line = death("EngineCore", status)
    assert line.startswith(f"EngineCore was killed by {number.name} (signal {number}); fix: ")
    assert hint in line


def _end_slowly(number):
    os.closerange(3, 1024)  # The parent process uses it to detect the exit of this one.
    time.sleep(1)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("delay", [0.3, 60])
def test_worker_that_loses_a_peer_waits_for_its_own_signal(delay):
    """The kernel may deliver ctrl-C to one worker first; the next one sees a closed connection."""
    child = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(delay)], capture_output=True, text=True, timeout=120
    )
    assert ("Traceback" in child.stderr) == (delay > failures.SIGNAL_WITHIN), child.stderr
    assert child.returncode == (1 if delay > failures.SIGNAL_WITHIN else 0)


def test_worker_that_exits_slowly_is_described_by_its_signal(monkeypatch):
    """vLLM's monitor logs exit status None of a process that has closed its files and cannot be
    waited for yet."""

    class Executor(MultiprocExecutor):
        def __init__(self, process):
            self.workers, self.failure_callback = [types.SimpleNamespace(proc=process)], None

        def shutdown(self):
            pass

    monkeypatch.setattr(failures, "_found", [])
    failures.watch()
    process = multiprocessing.get_context("fork").Process(
        target=_end_slowly, args=(signal.SIGKILL,), name="VllmWorker-1"
    )
    process.start()
    Executor(process).start_worker_monitor(inline=True)
    assert failures.cause().startswith("VllmWorker-1 was killed by SIGKILL (signal 9); fix: ")


@pytest.mark.parametrize(
    ("workers", "cause"),
    [
        (2, "3 NPUs are needed; fix: list more"),
        (1, "VllmWorker-0: ValueError: lost the peer in two lines"),
        (
            0,
            (
                "EngineCore: Exception: WorkerProc initialization failed due to an exception in a"
                " background process."
            ),
        ),
    ],
)
def test_command_reports_the_cause_with_explained_ones_first(tmp_path, workers, cause):
    script, sockets = tmp_path / "script.py", tmp_path / "sockets"
    script.write_text(CHILD)
    sockets.mkdir()
    environ = os.environ | {"VLLM_RPC_BASE_PATH": str(sockets)}
    done = subprocess.run(
        [sys.executable, str(script), str(workers)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == [cause, "[]"], done.stderr


def test_cause_of_an_earlier_process_with_this_id_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.setattr(failures, "_found", [])
    Path(tmp_path, f"failure-{os.getpid()}").write_text("0 stale\n")
    failures.forget()
    assert failures.cause() == ""


def test_files_of_other_users_are_left_alone(tmp_path, monkeypatch):
    """In /tmp, for example, where anyone can create a file of the foreseeable name, or a link."""
    (victim := tmp_path / "victim").write_text("0 planted\n")
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(shared))
    monkeypatch.setattr(failures, "_found", [])
    for process in (os.getpid(), os.getppid()):
        (shared / f"failure-{process}").symlink_to(victim)
    failures._report("a line", unexplained=True)
    assert failures.cause() == ""
    failures.forget()
    assert victim.read_text() == "0 planted\n"
    assert len(list(shared.iterdir())) == 2
    from ascend_platform.process import sockets

    monkeypatch.setattr(sockets, "LONGEST", 1000)
    sockets.use_own_directory()
    directory = Path(os.environ["VLLM_RPC_BASE_PATH"])
    assert directory.parent == shared
    assert sockets.is_private(str(directory))
    (tmp_path / "link").symlink_to(directory)
    assert not sockets.is_private(str(tmp_path / "link"))


def test_architectures_for_other_devices_only_are_refused():
    from ascend_platform.config import architectures
    from vllm.model_executor.models.registry import ModelRegistry

    error = ValueError(
        "Model architectures ['KimiK3ForConditionalGeneration'] failed to be inspected. Please"
        " check the logs for details."
    )
    assert "KimiK3ForConditionalGeneration is not supported" in explain(error)
    assert "vLLM has its attention residuals and latent experts" in explain(error)
    packages = {
        model.module_name.split(".")[2]
        for model in ModelRegistry.models.values()
        if getattr(model, "module_name", "").startswith("vllm.models.")
    }
    # Each package of vLLM is decided on.
    assert packages - {"deepseek_v32"} == set(architectures.LACKING)
    for name in (
        "KimiK3ForConditionalGeneration",
        "MiniMaxM3MTP",
        "HYV4ForCausalLM",
    ):
        with pytest.raises(
            ValueError, match=f"{name} is not supported by ascend-platform .*; fix: "
        ):
            NPUPlatform.verify_model_arch(name)
    NPUPlatform.verify_model_arch("LlamaForCausalLM")


def test_architecture_of_a_wheel_that_is_not_loaded(monkeypatch):
    # In a process of its own: this one may have loaded all wheels.
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    program = """
from ascend_platform.config import architectures
from vllm.plugins import load_general_plugins

load_general_plugins()
print("LINE", architectures.refusal("KimiLinearForCausalLM"))
"""
    done = scripts.run(program)
    assert done.returncode == 0, done.stderr
    line = next(each for each in done.stdout.splitlines() if each.startswith("LINE"))
    assert line.startswith("LINE KimiLinearForCausalLM needs ascend-models, which is ")
    assert "; fix: " in line
