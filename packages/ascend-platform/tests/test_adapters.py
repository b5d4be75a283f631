"""Adapters that latent attention would leave out, in vLLM's own manager."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_platform.ops import punica
from harness.models import small as small_models
from safetensors.torch import save_file
from vllm.config import LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.interfaces import SupportsLoRA

SIZES = {"kv_b_proj": (16, 32), "o_proj": (32, 64)}


class Attention(torch.nn.Module):
    """An attention with the projections of latent attention, and vLLM's inner layer, which also has kv_b_proj."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        for name, (inputs, outputs) in SIZES.items():
            setattr(self, name, ReplicatedLinear(inputs, outputs, bias=False, prefix=f"{prefix}.{name}"))
        self.mla_attn = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(self.mla_attn)
        self.mla_attn.kv_b_proj = self.kv_b_proj


class Model(torch.nn.Module, SupportsLoRA):
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(f"layers.{i}") for i in range(2)])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))


def adapter(directory: Path, number: int, *names: str) -> LoRARequest:
    path = directory / "-".join(names)
    path.mkdir(exist_ok=True)
    weights = {
        f"base_model.model.layers.1.{name}.lora_{part}.weight": torch.randn(shape)
        for name in names
        for part, shape in (("A", (8, SIZES[name][0])), ("B", (SIZES[name][1], 8)))
    }
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(names), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, number, str(path))


def manager(directory: Path, targets: list[str] | None) -> Any:
    (directory / "config.json").write_text(json.dumps(small_models.TINY))
    lora = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=2, lora_dtype=torch.float32, target_modules=targets)
    model = ModelConfig(str(directory), skip_tokenizer_init=True)
    config = VllmConfig(model_config=model, lora_config=lora, scheduler_config=SchedulerConfig.default_factory())
    with set_current_vllm_config(config):
        made = LRUCacheWorkerLoRAManager(config, torch.device("npu"), {})
        made.create_lora_manager(Model().npu(), config)
    punica.refuse_absorbed(made)
    return made


def test_adapters_of_kv_b_proj_are_refused(tmp_path: Path) -> None:
    """vLLM would apply the rest of such an adapter and say nothing."""
    made = manager(tmp_path, None)
    first = adapter(tmp_path, 1, "o_proj")
    assert made.add_adapter(first)
    with pytest.raises(ValueError, match=r"kv_b_proj-o_proj in .* adapts layers\.1\.kv_b_proj, .*; fix: ") as refused:
        made.add_adapter(adapter(tmp_path, 2, "kv_b_proj", "o_proj"))
    assert "\n" not in str(refused.value)
    assert made.list_adapters() == {1}


def test_adapters_of_kv_b_proj_are_loaded_without_it_on_request(tmp_path: Path) -> None:
    made = manager(tmp_path, ["o_proj"])
    assert made.add_adapter(adapter(tmp_path, 2, "kv_b_proj", "o_proj"))
    assert made.list_adapters() == {2}
