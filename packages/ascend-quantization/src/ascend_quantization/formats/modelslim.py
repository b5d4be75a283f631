# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ModelSlim checkpoints (``--quantization ascend``): a JSON file beside the weights names the
scheme of each tensor.

The format is that of msmodelslim's ``AscendV1Saver``: ``quant_model_description.json`` maps each
tensor's name to its scheme, and has ``version``, ``group_size`` and ``kv_cache_type`` for the whole
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from ascend_platform.extension import BiasedNorm, RefusedError
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from ascend_quantization.base import Layout
from ascend_quantization.common import DESCRIPTION, NAME, check_chip
from ascend_quantization.methods.experts import QuantizedExperts, matrices_of
from ascend_quantization.methods.kv_cache import CACHE_NAMES, Int8CacheMethod
from ascend_quantization.methods.linear import (
    ModelSlimLinearMethod,
    check_absorbed,
    is_absorbed,
)
from ascend_quantization.schemes import FLOAT, SCHEMES

CACHE_KINDS = ("C8",)
STATIC = "W8A8"
NORM_BIASES = ("layernorm.bias", ".norm.bias")

PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Matrices that vLLM fuses, of drafters: it gives their configurations no names."""

UNQUANTIZED = (".indexer.wk.weight", ".indexer.weights_proj.weight")
"""Ends of names of DeepSeek-V3.2 and GLM-5, which vLLM fuses into one layer without quantization.
"""


@register_quantization_config(NAME)
class ModelSlimConfig(QuantizationConfig):
    """Quantization configuration from the description file, which gives each layer its method."""

    def __init__(self, description: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.description: dict[str, Any] = {}
        self.int8_cache = False
        self.norm_biases = False  # Of RMSNorm, see _check_biases.
        self._asked: set[str] = set()  # Matrices and experts for which vLLM has requested a method.
        self._absorbed: set[str] = set()  # Those of which MLA takes only the matrix.
        if description:
            self._take(description)

    @classmethod
    def get_name(cls) -> Any:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA

    @staticmethod
    def get_config_filenames() -> list[str]:
        # maybe_update_config reads the description; its error for a missing file names the fix.
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSlimConfig:
        """From ``quantization_config`` of a model's configuration, which may contain the
        description."""
        return cls({key: value for key, value in config.items() if key != "quant_method"})

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the description beside the weights.

        Raises:
            RefusedError: there is none, or it has a scheme that is not supported.
        """
        if self.description:
            return
        description = get_hf_file_to_dict(DESCRIPTION, model_name, revision or "main")
        if description is None:
            raise RefusedError(
                f"--quantization {NAME} is for ModelSlim checkpoints, which have a file"
                f" {DESCRIPTION}; {model_name} has none; fix: remove --quantization, or quantize"
                " the model with ModelSlim"
            )
        self._take(description)
        if (first := getattr(hf_config, "target_layer_count", None)) is not None:
            # vLLM numbers EAGLE-3's layers after the target's.
            numbers = range(hf_config.num_hidden_layers)
            names = {f"layers.{number}.": f"model.layers.{first + number}." for number in numbers}
            names |= {"midlayer.": names["layers.0."], "fc.": "model.fc."}
            self.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=names))

    def _take(self, description: dict[str, Any]) -> None:
        weights = {name: kind for name, kind in description.items() if _is_weight(name)}
        if not weights:
            return
        unknown = sorted({str(kind) for kind in weights.values()} - {FLOAT, *SCHEMES})
        if unknown:
            example = next(name for name, kind in weights.items() if kind in unknown)
            raise RefusedError(
                f"{DESCRIPTION} has weights of {', '.join(unknown)} (such as {example}); supported:"
                f" {', '.join(SCHEMES)}, {FLOAT}; fix: quantize the model again with these"
            )
        cache = description.get("kv_cache_type") or description.get("kv_quant_type")
        types = (cache, description.get("fa_quant_type"))
        if others := ", ".join(str(each) for each in types if each and each not in CACHE_KINDS):
            raise RefusedError(
                f"{DESCRIPTION} asks for KV cache or attention quantization {others}; supported: C8"
                " (int8 KV cache); fix: quantize the model again with C8, or without"
            )
        for name, kind in weights.items():
            if kind != FLOAT and name.endswith(UNQUANTIZED):
                raise _unquantized(name, kind)
        check_chip([kind for kind in weights.values() if kind != FLOAT])
        self.description, self.int8_cache = description, bool(cache)
        self.norm_biases = any(name.endswith(NORM_BIASES) for name in description)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        # Names without a dot are of fields, and a mapper may rename all that it gets.
        fields = {name: value for name, value in self.description.items() if "." not in name}
        self.description = hf_to_vllm_mapper.apply_dict(self.description) | fields

    # vLLM's method is static, and called on the object.
    def get_cache_scale_mapper(self) -> WeightsMapper:
        return (
            WeightsMapper(orig_to_new_suffix=CACHE_NAMES)
            | QuantizationConfig.get_cache_scale_mapper()
        )

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Drop tensors that are not used: ``scale_bias``, which is computed here, and shapes before
        packing."""
        return WeightsMapper(orig_to_new_suffix={".scale_bias": None, ".weight_shape": None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        prefix = prefix.removeprefix("draft_model.")  # vLLM's for drafters
        if isinstance(layer, Attention):
            return Int8CacheMethod(prefix) if self.int8_cache else None
        if isinstance(layer, RoutedExperts):
            self._asked.add(prefix)
            parts = matrices_of(layer, prefix, {})
            kind = self._kind(parts, prefix)
            if kind == FLOAT:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            scheme = SCHEMES[kind]
            size = int(self.description.get("group_size") or 0) if scheme.expert_groups else 0
            group_size = scheme.group_size or size
            stored = scheme.stored(self.description, parts[0])
            if not any(tensor.layout == Layout.GROUPS for tensor in stored.values()):
                group_size = 0
            own = (scheme, stored, scheme.read, group_size, prefix)
            return QuantizedExperts(layer.moe_config, *own)
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            matrices = matrices_of(layer, prefix, PARTS | self.packed_modules_mapping)
            if not any(self._of(name) for name in matrices):
                matrices = [prefix]
            self._asked.update(matrices)
            if isinstance(layer, VocabParallelEmbedding):
                # Tied heads are not in the description.
                if (kind := self._of(prefix) or FLOAT) != FLOAT:
                    raise RefusedError(
                        f"{prefix} is {kind}; embeddings and output heads are supported as {FLOAT};"
                        " fix: quantize the model again"
                    )
                return UnquantizedEmbeddingMethod()
            kind = self._kind(matrices, prefix)
            has_bias = any(f"{name}.bias" in self.description for name in matrices)
            if is_absorbed(prefix):
                self._absorbed.update(matrices)
            elif has_bias and kind != STATIC:
                keep_bias(layer)
            if kind == FLOAT:
                return UnquantizedLinearMethod()
            check_absorbed(kind, prefix)
            stored = SCHEMES[kind].stored(self.description, matrices[0])
            return ModelSlimLinearMethod(SCHEMES[kind], stored, prefix)
        return None

    def check_loaded(self, model: torch.nn.Module) -> None:
        """Check that vLLM quantizes each layer that the description calls quantized: others would
        load integers as numbers. Also check the biases.

        Raises:
            RefusedError: vLLM keeps a layer unquantized, such as the indexer's wk of DeepSeek-V3.2,
                or without a bias.
        """
        modules = dict(model.named_modules())
        self._check_biases(modules)
        for name, kind in self.description.items():
            matrix = name.rpartition(".")[0]
            parents = [matrix[: found.start()] for found in re.finditer(r"\.", matrix)]
            is_quantized = _is_weight(name) and kind != FLOAT
            if not is_quantized or not self._asked.isdisjoint([matrix, *parents]):
                continue
            if parents and parents[-1] in modules:  # a layer of this rank
                raise _unquantized(name, kind)

    def _check_biases(self, modules: dict[str, torch.nn.Module]) -> None:
        """Refuse layers that lack the bias which undoes that of an RMSNorm (anti-outlier), as
        AutoWeightsLoader drops it."""
        norms = [each for each in modules.values() if isinstance(each, BiasedNorm)]
        for norm in norms:
            norm.bias = norm.bias if norm.bias is not None and norm.bias.any() else None
        if all(norm.bias is None for norm in norms):
            return
        kept = self._asked - self._absorbed
        for name in self.description:
            matrix = name.removesuffix(".bias")
            if matrix == name or matrix in kept:
                continue
            layer = modules.get(re.sub(r"(\.experts)\..*", r"\1", matrix))
            if isinstance(layer, PPMissingLayer):  # of another stage
                continue
            if layer not in (None, *norms) and getattr(layer, "bias", None) is None:
                raise RefusedError(
                    f"{DESCRIPTION} has {name}, and vLLM's layer has no bias; fix: quantize the"
                    " model again with symmetric anti-outlier"
                )

    def _of(self, matrix: str) -> str | None:
        names = f"{matrix}.weight", f"{matrix}.weight_packed"
        return self.description.get(names[0]) or self.description.get(names[1])

    def _kind(self, matrices: Iterable[str], prefix: str) -> str:
        kinds = {name: self._of(name) for name in matrices}
        if not any(kinds.values()):
            raise RefusedError(
                f"{DESCRIPTION} has no scheme for {', '.join(kinds)}; fix: add it there, {FLOAT!r}"
                " if it is not quantized"
            )
        if len(set(kinds.values())) > 1:
            found = ", ".join(f"{name.rpartition('.')[2]} {kind}" for name, kind in kinds.items())
            raise RefusedError(
                f"the matrices of {prefix}, which vLLM fuses, have different schemes ({found});"
                " fix: quantize them alike"
            )
        return str(next(iter(kinds.values())))


def keep_bias(layer: Any) -> None:
    """Give a bias to a linear layer that is being made, if its model has no bias."""
    register = layer.register_parameter

    def keep(name: str, parameter: torch.nn.Parameter | None) -> None:
        if name == "bias" and parameter is None:
            size = getattr(layer, "output_size_per_partition", layer.output_size)
            parameter = torch.nn.Parameter(torch.zeros(size), requires_grad=False)
            loads = {"output_dim": 0, "weight_loader": layer.weight_loader}
            set_weight_attrs(parameter, loads)
        register(name, parameter)

    layer.register_parameter = keep


def _unquantized(name: str, kind: str) -> RefusedError:
    return RefusedError(
        f"{DESCRIPTION} has {name} as {kind}, and vLLM keeps that layer unquantized; fix: quantize"
        f" the model again with {name.rpartition('.')[0]} as {FLOAT}"
    )


def _is_weight(name: str) -> bool:
    return name.endswith((".weight", ".weight_packed"))
