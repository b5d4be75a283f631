# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weights and adapters of the conformance suite's engines, replaced as in a running engine of vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ascend_kv_connector.testing import Engine
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore


def write_adapter(directory: Path, contents: int) -> str:
    """Files of an adapter instead of those that are there; its path."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (directory / "adapter_model.safetensors").write_bytes(bytes([contents]) * 4096)
    return str(directory)


class Replaceable:
    """Version of the weights of an engine, by number, and contents of its adapters by id, as vLLM's
    workers load them.

    KV cache has a value for each of both. ``forget`` drops an adapter, as a worker does for others.
    """

    def __init__(self, engine: Engine, weights: int = 0) -> None:
        self.engine, self.weights = engine, weights
        self.adapters: dict[int, int] = {}
        engine.version = self.version
        engine.config.__post_init__()  # As EngineCoreProc does when it has started.
        self.core: Any = SimpleNamespace(
            vllm_config=engine.config,
            model_executor=SimpleNamespace(collective_rpc=self._call, add_lora=self._load),
        )

    def version(self, request: Any) -> int:
        lora = request.lora_request
        if lora is None:
            return self.weights
        if lora.load_inplace or lora.lora_int_id not in self.adapters:
            self._load(lora)
        return self.weights + self.adapters[lora.lora_int_id]

    def replace(self, method: Any = "update_weights", weights: int = 1) -> None:
        """Other weights, as a trainer sends them by a method of vLLM's workers."""
        EngineCore.collective_rpc(self.core, method, args=(weights,))

    def load(self, lora: LoRARequest) -> None:
        """Load an adapter, as the API of vLLM does for ``/v1/load_lora_adapter``."""
        EngineCore.add_lora(self.core, lora)

    def forget(self, number: int) -> None:
        del self.adapters[number]

    def _call(self, method: Any, timeout: Any, args: tuple[int], kwargs: Any) -> list[Any]:
        (self.weights,) = args
        self.adapters.clear()
        return []

    def _load(self, lora: LoRARequest) -> bool:
        file = Path(lora.lora_path, "adapter_model.safetensors")
        self.adapters[lora.lora_int_id] = file.read_bytes()[0]
        return True
