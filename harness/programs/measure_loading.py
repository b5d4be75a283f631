# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check loading`: load a checkpoint by each strategy, and copy as many bytes over
plain TCP.

    python harness/programs/measure_loading.py MODEL ROUNDS

Prints `RESULT {json}`: seconds of each load and GB/s of each copy. One process serves, on NPU 0;
this one loads, on NPU 1.
"""

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from ascend_model_loader import FORMATS, server
from ascend_model_loader.chunks import CHUNK_BYTES
from ascend_model_loader.loader import PeerModelLoader
from harness.weights.streams import STREAMS
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
    parallel_state,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,
    get_model_loader,
    register_model_loader,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.network_utils import get_open_port

os.environ["VLLM_ASCEND_WEIGHTS_SECRET"] = "a secret for this measurement"
CONNECTIONS = 4


class Loader(PeerModelLoader):
    """Touches the parameters first: the first write to an emulated NPU's memory is a page fault of
    the host."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        for each in model.parameters():
            each.data.fill_(1)  # zero_ gives memory back
        torch.npu.synchronize()
        super().load_weights(model, model_config)


def load(
    model: str, device: int, extra: dict[str, Any], **engine: Any
) -> tuple[Any, BaseModelLoader]:
    """The model, and the loader that has loaded it, in this process and without an engine."""
    options: dict[str, Any] = {
        "load_format": "ascend_peer",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    } | engine
    config = EngineArgs(
        model, model_loader_extra_config=extra, use_tqdm_on_load=False, **options
    ).create_engine_config()
    config.device_config.device = torch.device("npu", device)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            torch.npu.set_device(device)
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", device, "hccl")
        if config.model_config.is_moe and parallel_state._EP is None:
            destroy_model_parallel()  # vLLM creates no expert groups for a dense model.
        ensure_model_parallel_initialized(1, 1)
        for name in FORMATS:
            if name not in _LOAD_FORMAT_TO_MODEL_LOADER:
                register_model_loader(name)(Loader)
        loader = get_model_loader(config.load_config)
        return loader.load_model(config, config.model_config), loader


def copy_to(port: int, size: int, device: str) -> float:
    """GB/s of a plain copy into memory that has been written to, over several connections.

    Between NPUs each connection goes through one pinned buffer of 4 MiB, as in a program that has
    only the copies in mind.
    """
    target = torch.full([size], 1, dtype=torch.uint8, device=device)
    torch.npu.synchronize()
    part = -(-size // CONNECTIONS)

    def take(number: int) -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(bytes([number]))
        mine = target[number * part : (number + 1) * part]
        if device == "cpu":
            receive(connection, mine.numpy().data)
            return
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        torch.npu.set_device(device)
        for chunk in mine.split(CHUNK_BYTES):
            receive(connection, buffer.numpy().data[: len(chunk)])
            chunk.copy_(buffer[: len(chunk)])

    begin = time.perf_counter()
    threads = [threading.Thread(target=take, args=[number]) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return size / (time.perf_counter() - begin) / 1e9


def receive(connection: socket.socket, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        filled += connection.recv_into(into[filled:])


def copy_from(listening: socket.socket, size: int, device: str) -> None:
    source = torch.full([size], 7, dtype=torch.uint8, device=device)
    torch.npu.synchronize()
    part = -(-size // CONNECTIONS)

    def give(connection: socket.socket) -> None:
        number = connection.recv(1)[0]
        mine = source[number * part : (number + 1) * part]
        if device == "cpu":
            connection.sendall(mine.numpy().data)
        else:
            torch.npu.set_device(device)
            buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            for chunk in mine.split(CHUNK_BYTES):
                buffer[: len(chunk)].copy_(chunk)
                connection.sendall(buffer.numpy().data[: len(chunk)])
        connection.close()

    while True:
        threading.Thread(target=give, args=listening.accept()[:1], daemon=True).start()


def serve(model: str, pipe: Connection) -> None:
    _, loader = load(model, 0, {"strategies": ["default"], "serve_weights": True, "port": 0})
    server.awake(True)
    size = sum(phase.bytes for phase in loader.report.phases if phase.name.startswith("checksums"))
    plain = {}
    for device in ("cpu", "npu:0"):
        listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=copy_from, args=[listening, size, device], daemon=True).start()
        plain[device] = listening.getsockname()[1]
    assert server.publication.server is not None
    pipe.send((server.publication.server.port, plain, size, loader.report.table()))
    pipe.recv()


def main(model: str, rounds: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=[model, theirs], daemon=True
    )
    process.start()
    if not ours.poll(300):
        raise TimeoutError("the server has not begun within 300 s")
    port, plain, size, table = ours.recv()
    print(table, file=sys.stderr)
    ways: dict[str, dict[str, Any]] = {
        "default": {"strategies": ["default"]},
        **STREAMS,
        "peer": {
            "strategies": ["peer"],
            "peers": [f"127.0.0.1:{port}"],
            "connections": CONNECTIONS,
        },
        "peer, 1 connection": {
            "strategies": ["peer"],
            "peers": [f"127.0.0.1:{port}"],
            "connections": 1,
        },
    }
    seconds_by_strategy: dict[str, list[float]] = {}
    digests: dict[str, float] = {}
    for _ in range(rounds):
        for name, extra in ways.items():
            try:
                model_object, loader = load(model, 1, extra)
            except RuntimeError as error:
                print(name, error, file=sys.stderr)
                continue
            print(name, loader.report.table(), sep="\n", file=sys.stderr)
            transfer = next(phase for phase in loader.report.phases if phase.bytes)
            seconds_by_strategy.setdefault(name, []).append(
                sum(phase.seconds for phase in loader.report.phases[:-1])
            )
            seconds_by_strategy.setdefault(f"{name} GB/s", []).append(
                transfer.bytes / transfer.seconds / 1e9
            )
            digests[name] = float(
                sum(each.double().abs().sum().item() for each in model_object.parameters())
            )
            del model_object, loader
            if name.startswith("peer"):
                seconds_by_strategy.setdefault("plain TCP GB/s", []).append(
                    copy_to(plain["cpu"], size, "cpu")
                )
                seconds_by_strategy.setdefault("plain TCP between NPUs GB/s", []).append(
                    copy_to(plain["npu:0"], size, "npu:1")
                )
    print(
        "RESULT",
        json.dumps({"size": size, "found": seconds_by_strategy, "sums": digests}),
        flush=True,
    )
    ours.send(None)
    process.join(20)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
