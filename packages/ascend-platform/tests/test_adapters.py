# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Adapters of layers that vLLM shards wrongly, does not reach or leaves out, in its own manager."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_platform.lora import layers
from harness.models import small as small_models
from safetensors.torch import save_file
from vllm.config import (
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.module_mapping import MultiModelKeys

SIZES = {
    "kv_b_proj": (16, 32),
    "o_proj": (32, 64),
    "gate": (16, 8),
    "mixer": (16, 32),
    "conv1d": (4, 32),
}


class Mixer(ColumnParallelLinear):
    """A layer that vLLM has no form with adapters for: it takes ColumnParallelLinear, and none that
    is derived from it."""


class Attention(torch.nn.Module):
    """An attention with the projections of latent attention, and vLLM's inner layer, which also has
    kv_b_proj."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        for name, (inputs, outputs) in SIZES.items() - {("mixer", SIZES["mixer"])}:
            setattr(
                self, name, ReplicatedLinear(inputs, outputs, bias=False, prefix=f"{prefix}.{name}")
            )
        self.mixer = Mixer(*SIZES["mixer"], bias=False, prefix=f"{prefix}.mixer")
        self.conv1d.weight.data = self.conv1d.weight.data.unsqueeze(1)
        self.expert = torch.nn.Module()
        self.expert.expert_gate = self.gate
        self.mla_attn = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(self.mla_attn)
        self.mla_attn.kv_b_proj = self.kv_b_proj


class Model(torch.nn.Module, SupportsLoRA):
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(f"layers.{i}") for i in range(2)])


class Outer(torch.nn.Module, SupportsLoRA):
    """Has the names of its layers below "model."."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


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
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": list(names),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, number, str(path))


def manager(directory: Path, targets: list[str] | None, create: Any = None, **options: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(small_models.TINY))
    lora = LoRAConfig(
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=2,
        lora_dtype=torch.float32,
        target_modules=targets,
        **options,
    )
    model = ModelConfig(str(directory), skip_tokenizer_init=True)
    config = VllmConfig(
        model_config=model, lora_config=lora, scheduler_config=SchedulerConfig.default_factory()
    )
    with set_current_vllm_config(config):
        lora_manager = LRUCacheWorkerLoRAManager(config, torch.device("npu"), {})
        lora_manager.create_lora_manager(create() if create else Model().npu(), config)
    layers.install(lora_manager)
    return lora_manager


@pytest.mark.parametrize("name", ["kv_b_proj", "mixer", "conv1d"])
def test_adapters_that_would_be_left_out_are_refused(name: str, tmp_path: Path) -> None:
    """vLLM would apply the rest of such an adapter and say nothing."""
    loaded = manager(tmp_path, None)
    first = adapter(tmp_path, 1, "o_proj")
    assert loaded.add_adapter(first)
    with pytest.raises(
        ValueError,
        match=rf"{name}-o_proj in .* adapts layers\.1\.{name}, .*; fix: .* without {name}",
    ) as refused:
        loaded.add_adapter(adapter(tmp_path, 2, name, "o_proj"))
    assert "\n" not in str(refused.value)
    assert loaded.list_adapters() == {1}


@pytest.mark.parametrize("kind", ["pooling", "text"])
def test_other_names_of_a_layer_are_refused(kind: str, tmp_path: Path) -> None:
    """Those that vLLM finds in adapters of pooling models, and of the text of a multimodal one."""
    loaded = manager(tmp_path, None, lambda: Outer().npu())
    known = loaded._adapter_manager
    if kind == "pooling":
        known.is_pooling_model = True
    elif hasattr(known, "_get_text_lora_names"):
        known.supports_mm = True
        known.mm_mapping = MultiModelKeys.from_string_field(language_model="model")
    else:
        pytest.skip("vLLM finds them from 0.33 on")
    layers.install(loaded)
    with pytest.raises(ValueError, match=r"adapts layers\.1\.kv_b_proj, which latent attention"):
        loaded.add_adapter(adapter(tmp_path, 2, "kv_b_proj", "o_proj"))
    assert loaded.list_adapters() == set()


def test_adapters_of_kv_b_proj_are_loaded_without_it_on_request(tmp_path: Path) -> None:
    loaded = manager(tmp_path, ["o_proj"])
    assert loaded.add_adapter(adapter(tmp_path, 2, "kv_b_proj", "o_proj"))
    assert loaded.list_adapters() == {2}


def test_layer_has_its_adapters_under_each_name(tmp_path: Path) -> None:
    """Qwen's shared experts multiply their output by the gate under a name of their own."""
    layer = manager(tmp_path, None)._adapter_manager.model.layers[1]
    assert isinstance(layer.gate, BaseLayerWithLoRA)
    assert layer.expert.expert_gate is layer.gate


class Mamba(torch.nn.Module, SupportsLoRA):
    """A layer of Mamba 1, which computes the inner projections of a step's prefills first, and then
    those of its decodes."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "ssm_state_size": 4,
            "conv_kernel_size": 4,
            "intermediate_size": 16,
            "time_step_rank": 4,
        }
        options = {
            "use_conv_bias": True,
            "use_bias": False,
            "use_rms_norm": False,
            "is_lora_enabled": True,
        }
        self.mixer = MambaMixer(8, **sizes, **options, prefix="mixer")


def test_mamba_inner_projections_have_their_tokens_adapters(tmp_path: Path) -> None:
    loaded = manager(tmp_path, None, lambda: Mamba().npu())
    known = loaded._adapter_manager
    mixer = known.model.mixer
    x_proj = mixer.x_proj
    weight, a, b = (torch.randn(shape, device="npu") for shape in ((12, 16), (8, 16), (12, 8)))
    x_proj.base_layer.weight.data.copy_(weight)
    x_proj.set_lora(0, a, b)
    (wrapper,) = known.punica_wrapper_mapping.values()

    def check(decodes: list[int], prefills: list[int]) -> None:
        tokens = tuple(decodes + prefills)  # 1 with the adapter
        wrapper.update_metadata(LoRAMapping(tokens, tokens), [1, None], 3, 100)
        metadata = SimpleNamespace(num_decode_tokens=len(decodes), num_prefill_tokens=len(prefills))
        with set_forward_context({"mixer": metadata}, VllmConfig()):
            for rows in filter(None, (prefills, decodes)):
                x = torch.randn(len(rows), 16, device="npu")
                exact = x @ weight.T + (x @ a.T @ b.T) * torch.tensor(rows, device="npu")[:, None]
                actual = torch.cat(mixer._ssm_transform(x)[1:], 1)
                torch.testing.assert_close(actual, exact[:, 4:], rtol=1e-4, atol=1e-4)

    for _ in range(2):
        check([1, 0], [0, 1, 1])
        check([], [0, 1, 1])
        check([0, 1], [])
        check([0, 1], [1, 0])


class Hybrid(torch.nn.Module, SupportsLoRA):
    """Layers with one B that are sharded by parts: of a gated delta net, a gated MLP, and Mamba 2
    with one group or several."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = {name: ["whole"] for name in ("one", "two", "in_proj")}
        mixer = {
            "ssm_state_size": 4,
            "conv_kernel_size": 4,
            "intermediate_size": 16,
            "num_heads": 4,
            "head_dim": 4,
        }
        common = {"hidden_size": 8, "use_conv_bias": True, "use_bias": False, **mixer}
        self.one = MergedColumnParallelLinear(8, [24], bias=False, prefix="one")
        self.two = MergedColumnParallelLinear(8, [16, 24], bias=False, prefix="two")
        self.group = MambaMixer2(**common, n_groups=1, prefix="group")
        self.groups = MambaMixer2(**common, n_groups=2, prefix="groups")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_fully_sharded", [False, True])
def test_adapters_are_sharded_as_their_layers(
    rank: int, is_fully_sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's own loader of weights decides, before the layer has an adapter."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=2))
    whole, shards = {}, {}

    def create() -> Any:
        model = Hybrid().npu()
        for name, layer in model.named_modules():
            if name in ("one", "two") or name.endswith("in_proj"):
                rows = {"one": 24, "two": 40, "group.in_proj": 44, "groups.in_proj": 52}[name]
                whole[name] = torch.arange(rows * 8.0).view(rows, 8).npu()
                layer.weight.weight_loader(layer.weight, whole[name])
                shards[name] = layer.weight.data.clone()
        return model

    loaded = manager(tmp_path, None, create, fully_sharded_loras=is_fully_sharded)
    layers = {
        name: layer for name, layer in loaded._adapter_manager.modules.items() if name in whole
    }
    # vLLM has no form of it
    assert layers.keys() == whole.keys() - ({"groups.in_proj"} if is_fully_sharded else set())
    for name, layer in layers.items():
        layer.set_lora(0, torch.zeros(8, 8).npu(), whole[name])
        result = torch.cat([b[0, 0] for b in layer.lora_b_stacked])
        assert torch.equal(result, shards[name]), name
