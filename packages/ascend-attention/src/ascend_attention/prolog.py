# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The layer around multi-head latent attention, with npu_mla_prolog_v3 for what precedes the
attention of decodes.

The operator computes the projections, norms and rotation, and writes the KV cache. It stores the
rotated part of a key with its even elements first; other steps do the same here, so that scores are
those of the model. The platform checks the operator's limits by the model's configuration; tensors
are contiguous, as op-plugin's page for CANN 9.1 asks.
"""

import functools
from typing import Any, cast

import torch
import torch_npu
from ascend_platform import extension
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from ascend_attention.latent import FusedLatentAttentionImpl

ND = 2  # ACL_FORMAT_ND


class RopeInHalves(torch.nn.Module):
    """Rotary embedding of pairs of elements whose results have the even elements first."""

    rope: Any

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope
        rope.is_neox_style = rope.gets_halves = True  # all layers share it

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate ``[tokens, heads, 64]`` by positions ``[tokens]``."""
        rotated: tuple[torch.Tensor, torch.Tensor] = self.rope(
            positions, halves(query), halves(key)
        )
        return rotated


def halves(pairs: torch.Tensor) -> torch.Tensor:
    """Put the even elements of the last dimension before the odd ones."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class PrologAttention(MLAAttention):
    """vLLM's MLAAttention with weights for the operator.

    Attributes:
        projections: the layers from the hidden state to the latents of query and key, and from the
            former to the query.
        prolog_weights: ``weight_dq``, ``weight_uq_qr``, ``weight_uk`` and ``weight_dkv_kr``; none
            with weights of other dtypes than bfloat16 and int8 with dynamic inputs.
        prolog_scales: of int8 weights, by the operator's names.
    """

    projections: tuple[Any, Any]
    prolog_weights: tuple[torch.Tensor, ...] = ()
    prolog_scales: dict[str, torch.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        is_int8 = all(map(extension.takes_int8_rows, self.projections))
        down, up = (layer.weight.data for layer in self.projections)
        if not is_int8 and {down.dtype, up.dtype} != {torch.bfloat16}:
            _log_once(
                "npu_mla_prolog_v3 disabled: weights before latent attention are neither"
                " bfloat16 nor int8 with dynamic inputs"
            )
            return
        if is_int8:
            down = torch_npu.npu_format_cast(down, ND)
        else:
            down, up = down.t(), up.t()
        rank, up_key = len(up), cast(torch.Tensor, self.W_UK_T)
        halves_of_down = down[:, :rank], down[:, rank:]
        down_query, down_key = (extension.to_nz(each) for each in halves_of_down)
        weights = down_query, extension.to_nz(up), up_key.contiguous(), down_key
        if is_int8:
            self._set_scales(rank)
        for old, new in zip(self.prolog_weights, weights, strict=False):
            old.copy_(new)  # graphs have the addresses
        self.prolog_weights = self.prolog_weights or weights

    def _set_scales(self, rank: int) -> None:
        down, up = (layer.weight_scale.data[None] for layer in self.projections)
        names = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
        self.prolog_scales = dict(zip(names, (down[:, :rank], up, down[:, rank:]), strict=True))

    def preprocess(
        self, hidden_states: torch.Tensor, tokens: int, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The query's latent and rotated parts, ``[tokens, heads, 512 and 64]``; writes the KV
        cache."""
        if self.prolog_scales:
            values, scale = extension.int8_rows(hidden_states)
            named |= self.prolog_scales | {"dequant_scale_x": scale[:tokens, None]}
            named["weight_quant_mode"] = 2  # all but weight_uk
        else:
            values = hidden_states
        weights = self.prolog_weights
        query, rope, *_ = torch_npu.npu_mla_prolog_v3(values[:tokens], *weights, *more, **named)
        return query, rope


@functools.cache
def _log_once(line: str) -> None:
    extension.logger.info(line)


class FusedLatentLayer(MultiHeadLatentAttentionWrapper):
    """vLLM's layer, with the option ``ascend.platform.mla_prolog``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        attention: Any = self.mla_attn
        rope: Any = self.rotary_emb
        if (
            extension.rope_order(config) != "halves"
            or rope is None
            or (rope.is_neox_style and not hasattr(rope, "gets_halves"))
        ):
            return
        self.rotary_emb = RopeInHalves(rope)
        plain = (
            self.g_proj is None
            and getattr(self.q_a_layernorm, "bias", None) is None
            and not self.dcp_q_replicate
            and isinstance(attention.impl, FusedLatentAttentionImpl)
        )
        if plain and extension.uses_mla_prolog(config):
            attention.__class__ = PrologAttention
            attention.projections = self.fused_qkv_a_proj, self.q_b_proj

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of hidden states ``[tokens, hidden_size]``, with the operator where all
        requests are absorbed."""
        attention: Any = self.mla_attn
        query_norm: Any = self.q_a_layernorm
        key_norm: Any = self.kv_a_layernorm
        weights = getattr(attention, "prolog_weights", ())
        context: tuple[Any, ...] = (
            get_attention_context(attention.layer_name) if weights else (None,) * 4
        )
        metadata, _, kv_cache, slots = context
        if metadata is None or metadata.num_prefills or llama_4_scaling is not None:
            return super().forward(positions, hidden_states, llama_4_scaling)
        tokens = metadata.num_actual_tokens
        cos, sin = self._angles(positions, query_norm.weight)
        query, query_rope = attention.preprocess(
            hidden_states,
            tokens,
            query_norm.weight,
            key_norm.weight,
            sin[:tokens],
            cos[:tokens],
            *kv_cache,
            cache_index=slots[:tokens],
            rmsnorm_epsilon_cq=query_norm.variance_epsilon,
            rmsnorm_epsilon_ckv=key_norm.variance_epsilon,
        )
        output = query.new_empty(len(hidden_states), self.num_heads * self.v_head_dim)
        attend(query, query_rope, output[:tokens], attention.layer_name)
        return self.o_proj(output)[0]

    def _angles(self, positions: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Cosines and sines ``[tokens, 64]`` by position, once in a forward pass."""
        rope: Any = self.rotary_emb
        table = rope.rope._match_cos_sin_cache_dtype(like)
        known: dict[str, list[torch.Tensor]] = get_forward_context().additional_kwargs
        # vLLM's V2 runner warms up in the context of a capture.
        key = f"latent rope {table.data_ptr()} {extension.is_captured()}"
        if key not in known:
            known[key] = [
                torch.cat((part, part), -1)
                for part in table.index_select(0, positions).chunk(2, -1)
            ]
        return known[key]


@maybe_transfer_kv_layer
def attend(
    query: torch.Tensor, query_rope: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    """Compute attention of absorbed queries ``[tokens, heads, 512 and 64]``; output is ``[tokens,
    heads * v_head_dim]``."""
    context: tuple[Any, ...] = get_attention_context(layer_name)
    metadata, layer, kv_cache, _ = context
    attended, _ = layer.impl.forward_mqa((query, query_rope), kv_cache, metadata, layer)
    layer._v_up_proj(attended, out=output)
