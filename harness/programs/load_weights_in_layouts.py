# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_model_loading.py on two NPUs: load a mixture of experts in each layout from a server
of each layout.

    python harness/programs/load_weights_in_layouts.py MODEL

Prints `RESULT {json}`: for each pair, what became of it in each rank.
"""

import json
import os
import sys
from typing import Any

import harness.engines.imports  # noqa: F401
import torch
from ascend_model_loader import server
from harness.compare.layouts import OF_EXPERTS
from harness.engines import launcher
from harness.engines.ports import free_port
from load_weights import digest
from measure_loading import Loader
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import register_model_loader

LAYOUTS = ("TP2", "PP2", "TP2 EP2", "DP2")
OPTIONS: dict[str, Any] = {
    "load_format": "ascend_peer",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}


class Layout:
    """vLLM's groups for a layout, one after the other in a process."""

    def __init__(self, model: str, name: str) -> None:
        given = OPTIONS | OF_EXPERTS[name] | {"distributed_executor_backend": "external_launcher"}
        self.config = EngineArgs(model, use_tqdm_on_load=False, **given).create_engine_config()
        parallel = self.config.parallel_config
        parallel.rank = int(os.environ["RANK"]) % parallel.world_size  # as a worker sets it
        self.config.device_config.device = torch.device("npu", torch.npu.current_device())

    def __enter__(self) -> "Layout":
        self._current = set_current_vllm_config(self.config)
        self._current.__enter__()
        parallel = self.config.parallel_config
        parallel_state.ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        return self

    def __exit__(self, *error: Any) -> None:
        parallel_state.destroy_model_parallel()
        self._current.__exit__(*error)

    def load(self, extra: dict[str, Any]) -> str:
        self.config.load_config.model_loader_extra_config = extra
        self.config.compilation_config.static_forward_context.clear()
        return digest(
            Loader(self.config.load_config).load_model(self.config, self.config.model_config)
        )


def work(model: str, free: list[list[int]]) -> dict[str, str]:
    """``free`` are ports by layout and rank; ascend-model-loader adds the rank to those of its
    options."""
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    parallel_state.init_distributed_environment(2, rank, "env://", rank, "hccl")
    results, servers = {}, []
    ports = [each[rank] - rank for each in free]
    for name, port in zip(LAYOUTS, ports, strict=True):
        with Layout(model, name) as layout:
            results[name] = layout.load(
                {"strategies": ["default"], "serve_weights": True, "port": port}
            )
            server.awake(True)
            servers.append(server.publication.server)
            server.publication.server = None  # Otherwise the next one reuses its port.
    for name in LAYOUTS:
        with Layout(model, name) as layout:
            parallel_state.get_world_group().barrier()  # all serve
            for other, port in zip(LAYOUTS, ports, strict=True):
                extra = {
                    "peers": [f"127.0.0.1:{port}"],
                    "timeout": 10,
                    "strategies": ["peer"],
                }
                try:
                    results[f"{name} from {other}"] = layout.load(extra)
                except RuntimeError as error:
                    results[f"{name} from {other}"] = str(error)
    parallel_state.get_world_group().barrier()  # No process exits while it still serves.
    return results


def main(model: str) -> None:
    os.environ["VLLM_ASCEND_WEIGHTS_SECRET"] = "a secret of two ranks"
    free = [[free_port() for _ in range(2)] for _ in LAYOUTS]

    def one(rank: int, meeting: int) -> dict[str, str]:
        os.environ.update(launcher.torchrun_variables(rank, 2, meeting))
        register_model_loader("ascend_peer")(Loader)
        return work(model, free)

    print("RESULT", json.dumps(launcher.run_ranks("layouts", 2, one)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
