"""LoRA adapters as they are loaded: those of a matrix that latent attention has made part of others are refused."""

from __future__ import annotations

from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import MLAAttention

from ascend_platform.components import RefusedError


def refuse_absorbed(manager: Any) -> None:
    """Let a WorkerLoRAManager refuse adapters of ``kv_b_proj``, before it stores or evicts any.

    vLLM's MLAAttention computes with W_UK and W_UV, copies of the layer's parts, and would leave such an adapter out. Layers
    that ``--lora-target-modules`` excludes are no part of the manager's, and adapters of them are left out on request.
    """
    known, load = manager._adapter_manager, manager._load_adapter
    layers = {id(layer.kv_b_proj) for layer in known.model.modules() if isinstance(layer, MLAAttention)}
    absorbed = {name for name, module in known.modules.items() if id(module) in layers}

    def load_adapter(request: LoRARequest) -> LoRAModel:
        adapter: LoRAModel = load(request)
        if found := sorted(absorbed & adapter.loras.keys()):
            raise RefusedError(
                f"LoRA adapter {request.lora_name} in {request.lora_path} adapts {found[0]}, which latent attention "
                "multiplies into others when the model is loaded; fix: an adapter of other layers, or --lora-target-modules "
                "without kv_b_proj, which leaves this part of the adapter out"
            )
        return adapter

    manager._load_adapter = load_adapter
