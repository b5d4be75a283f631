# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sizes of a model from its configuration: weights, KV cache, and work per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_platform.extension import installation

from ascend_cli.plan import unread

BITS = {"none": 16} | {
    name.removesuffix("_DYNAMIC").lower(): bits for name, bits in installation.SCHEME_BITS.items()
}
"""Bits of a weight of the linear layers; embeddings and the output head have 16 bits, as
ModelSlim does not quantize them."""
UNSUPPORTED_LAYERS = {"mamba", "mamba2", "recurrent", "conv"}
STATE_BLOCK = 128
"""Tokens by which the block size of attention grows, until a block's keys are as large as a state;
``STEP`` of state_cache.py."""
DELTA_OPERATORS = 60
"""Operators of a gated delta net in a decode step beyond those of attention; an estimate from its
functions in PyTorch."""
UNGATED = {"gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "starcoder2", "bloom", "mpt"}
"""Model types whose MLP has two matrices instead of three (``modeling_*.py`` of transformers)."""
TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom"}
"""Model types whose output head is the embedding unless the configuration says otherwise."""


@dataclass(frozen=True)
class Model:
    """Sizes in elements. ``experts`` is 0 for a dense model; ``mixed`` is the number of layers with
    experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    attention: int  # Attention weights of a layer.
    score: int  # Head sizes of query and value, summed.
    kv: int  # KV cache elements per token and layer; with MLA, the same on each rank.
    latent: bool  # MLA
    mlp: int  # weights of a dense layer's MLP
    mlp_width: int
    mixed: int = 0
    experts: int = 0
    chosen: int = 0
    expert: int = 0  # weights of one expert
    shared: int = 0  # Weights of a layer's shared experts and router.
    window: int = 0  # tokens that a sliding layer keeps
    sliding: int = 0  # layers with such a window
    # Layers with a gated delta net, which have a state for each request instead of a KV cache.
    linear: int = 0
    state: int = 0  # bytes of such a state
    longest: int = 0  # Tokens of a request, 0 where the configuration does not say it.
    scheme: str = "none"  # of the checkpoint

    @property
    def head(self) -> int:
        """Weights of the output head, or of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def dense(self) -> int:
        """Weights of all layers without routed experts."""
        return (
            self.layers * self.attention
            + (self.layers - self.mixed) * self.mlp
            + self.mixed * self.shared
        )

    @property
    def parameters(self) -> int:
        """All weights without norms and biases, which are less than a thousandth."""
        return (
            self.dense
            + self.mixed * self.experts * self.expert
            + self.head * (1 if self.tied else 2)
        )

    def vectors(self, int8: bool) -> dict[str, tuple[float, float]]:
        """Vector operators of a step by law: their number, and the elements that each token moves
        through them."""
        deep, mixed = self.layers, self.mixed
        width = (deep - mixed) * self.mlp_width + mixed * self.chosen * self.expert_width
        found = {
            "norm": (3.0 * deep, 8.0 * self.hidden * deep),
            "activation": (1.0 * deep, 3.0 * width),
            "rope": (1.0 * deep, self.attention / self.hidden * deep),
            "scatter": (1.0 * (deep - self.linear), 2.0 * self.kv * (deep - self.linear)),
            "routing": (3.0 * mixed, 4.0 * self.chosen * self.hidden * mixed),
            "elementwise": (
                (5.0 if self.latent else 2.0) * deep + DELTA_OPERATORS * self.linear,
                3.0 * self.hidden * deep,
            ),
        }
        if int8:
            found["quantize"] = (4.0 * deep, 3.0 * self.hidden * deep + 1.5 * width)
        return found

    @property
    def expert_width(self) -> int:
        """Width of an expert's MLP."""
        return self.expert // (3 * self.hidden)

    @property
    def matmuls(self) -> int:
        """Matmuls of a step without the output head; the experts of a layer are two."""
        return self.layers * (7 if self.latent else 4)

    @property
    def active(self) -> int:
        """Weights that are active for a token."""
        return self.dense + self.mixed * self.chosen * self.expert + self.head


def from_config(config: Mapping[str, Any], name: str = "") -> Model:
    """The sizes from a Hugging Face configuration, the contents of a config.json.

    Raises:
        ValueError: an unsupported model type, or a configuration without the fields of a decoder.
    """
    text = {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    kind = text.get("model_type", "")

    def get(*fields: str, of: Any = (int, float)) -> Any:
        name = next((field for field in fields if text.get(field) is not None), "")
        value = text.get(name, 0)
        if isinstance(value, list) and of is not list and value and value == value[:1] * len(value):
            value = value[0]  # for each layer (Hunyuan)
        if value and not isinstance(value, of):
            raise ValueError(
                f"{kind}: {name} is {str(value)[:40]}; supported: a number, the same in each layer;"
                " fix: plan another model"
            )
        return value

    if layers_unread := unread.reason(text):
        raise ValueError(
            f"{kind}: plan does not read {layers_unread}; supported: models whose layers have"
            " attention, latent attention or gated delta nets; fix: plan another model"
        )
    types = get("layer_types", of=list) or []
    linear = _linear_layers(text, types)
    others = UNSUPPORTED_LAYERS if linear else {*UNSUPPORTED_LAYERS, "linear_attention"}
    if odd := sorted(others.intersection(types)) or (
        ["an encoder"] if get("is_encoder_decoder") else []
    ):
        raise ValueError(
            f"{kind}: models with {odd[0]} are not supported; supported: attention in each layer;"
            " fix: plan another model"
        )
    hidden, layers, heads = (
        get("hidden_size", "n_embd"),
        get("num_hidden_layers", "n_layer"),
        get("num_attention_heads", "n_head"),
    )
    if not (hidden and layers and heads and get("vocab_size")):
        raise ValueError(
            f"{kind}: no hidden_size, num_hidden_layers, num_attention_heads or vocab_size in the"
            " configuration; fix: plan another model"
        )
    kv_heads = get("num_key_value_heads") or heads
    size = get("head_dim") or hidden // heads
    if latent := bool(get("kv_lora_rank")):
        nope, rope, value, rank = (
            get("qk_nope_head_dim"),
            get("qk_rope_head_dim"),
            get("v_head_dim"),
            get("kv_lora_rank"),
        )
        query = heads * (nope + rope)
        into = get("q_lora_rank")
        attention = (hidden * into + into * query if into else hidden * query) + hidden * (
            rank + rope
        )
        attention += rank * heads * (nope + value) + heads * value * hidden
        score, kv, kv_heads = nope + rope + value, rank + rope, 1
        if get("index_topk"):  # DSA
            count, width, own = get("index_n_heads"), get("index_head_dim"), _indexers(text, layers)
            attention += (into * count * width + hidden * (width + count)) * own // layers
            kv += width * own // layers
    else:
        attention = hidden * size * (2 * heads + 2 * kv_heads)
        score, kv = 2 * size, 2 * kv_heads * size
    if kind.startswith(("qwen3_next", "qwen3_5")):
        attention += hidden * size * heads  # a gate of its output
    state = 0
    if linear:
        of_keys, of_values = get("linear_num_key_heads"), get("linear_num_value_heads")
        keys, values = (
            of_keys * get("linear_key_head_dim"),
            of_values * get("linear_value_head_dim"),
        )
        delta = hidden * (2 * keys + 3 * values + 2 * of_values) + get("linear_conv_kernel_dim") * (
            2 * keys + values
        )
        attention = (attention * (layers - linear) + delta * linear) // layers
        state = (
            values
            * get("linear_key_head_dim")
            * (4 if "float32" in str(text.get("mamba_ssm_dtype")) else 2)
        )
    matrices = 2 if kind in UNGATED else 3
    width = get("intermediate_size", "n_inner") or 4 * hidden
    experts = get("n_routed_experts", "num_local_experts", "num_experts")
    mixed = expert = shared = 0
    chosen = get("num_experts_per_tok", "moe_topk", "top_k_experts")
    if experts and not chosen:
        raise ValueError(
            f"{kind}: {experts} experts, and no num_experts_per_tok, moe_topk or top_k_experts in"
            " the configuration; fix: plan another model"
        )
    if experts:
        expert_width = get("moe_intermediate_size") or width
        expert = 3 * hidden * expert_width
        shared_width = (
            get("shared_expert_intermediate_size") or get("n_shared_experts") * expert_width
        )
        shared = 3 * hidden * shared_width + hidden * experts
        step, first, without = (
            get("decoder_sparse_step") or 1,
            get("first_k_dense_replace"),
            get("mlp_only_layers", of=list) or [],
        )
        sparse = (get("mlp_layer_types", of=list) or []).count("sparse")
        mixed = sparse or sum(
            i >= first and i not in without and (i + 1) % step == 0 for i in range(layers)
        )
    sliding = types.count("sliding_attention") or (
        layers if get("sliding_window") and not types and kind == "mistral" else 0
    )
    return Model(
        name=name or kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=get("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in TIED))),
        attention=attention,
        score=score,
        kv=kv,
        latent=latent,
        mlp=matrices * hidden * width,
        mlp_width=width,
        mixed=mixed,
        experts=experts,
        chosen=chosen,
        expert=expert,
        shared=shared,
        window=get("sliding_window") if sliding else 0,
        sliding=sliding,
        linear=linear,
        state=state,
        longest=unread.longest(text),
        scheme=unread.scheme(config),
    )


def _linear_layers(text: Mapping[str, Any], types: list[str]) -> int:
    """Layers with a gated delta net (Qwen3-Next, Qwen3.5, OLMo-hybrid)."""
    if not text.get("linear_num_value_heads"):
        return 0
    layers = text.get("num_hidden_layers") or 0
    return (
        types.count("linear_attention")
        if types
        else layers - layers // (text.get("full_attention_interval") or 4)
    )


def _indexers(text: Mapping[str, Any], layers: int) -> int:
    """Layers with an indexer; the others reuse an earlier layer's selection (GLM-5)."""
    if kinds := text.get("indexer_types") or text.get("index_topk_pattern"):
        return sum(kind in ("full", "F") for kind in kinds)
    step, first = text.get("index_topk_freq") or 1, text.get("index_skip_topk_offset", 2)
    return sum(max(layer - first + 1, 0) % step == 0 for layer in range(layers))


def load(name: str) -> Model:
    """The sizes of a model in a directory or, if there is no such directory, on the Hugging Face
    Hub.

    Only config.json is read, without torch and transformers, which need CANN's libraries where
    torch_npu is installed.

    Raises:
        ValueError: see :func:`from_config`.
        OSError: the model was not found.
    """
    path = Path(name) / "config.json"
    if not path.parent.is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            path = Path(hf_hub_download(name, "config.json"))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            why = str(error).strip().partition("\n")[0]
            raise OSError(
                f"{name} is neither a directory nor available from the Hugging Face Hub: {why};"
                " fix: give a model's directory"
            ) from None
    try:
        config = {**json.loads(path.read_text())}
    except (ValueError, OSError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fix: give a model's directory") from None
    return from_config(config, name)
