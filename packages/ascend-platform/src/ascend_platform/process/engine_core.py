# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls of vLLM's engine core by which weights and adapters are replaced while it runs."""

from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from ascend_platform.process import replacements

_collective_rpc, _add_lora = EngineCore.collective_rpc, EngineCore.add_lora


def collective_rpc(
    core: EngineCore,
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Like the base method, but tell listeners before a method may replace weights or an
    adapter."""
    if method == "add_lora" and args and isinstance(args[0], LoRARequest):
        with replacements.note_adapter(core.vllm_config, args[0]):
            return _collective_rpc(core, method, timeout, args, kwargs)
    if method not in replacements.READS:
        replacements.note_weights(core.vllm_config)
    return _collective_rpc(core, method, timeout, args, kwargs)


def add_lora(core: EngineCore, lora_request: LoRARequest) -> bool:
    """Like the base method, between two notes of the adapter's files. vLLM decodes the argument by
    its annotation."""
    with replacements.note_adapter(core.vllm_config, lora_request):
        return _add_lora(core, lora_request)
