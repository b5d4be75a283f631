# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Qwen's gated delta net with fewer launches than vLLM's layer, and without host
synchronizations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

from ascend_platform.attention.base import GatedDeltaInputs
from ascend_platform.config.unsupported import SHARDED_STATES
from ascend_platform.state_layers.gated_delta_metadata import (
    NPUGDNAttentionBackend,
    NPUGDNAttentionMetadata,
)
from ascend_platform.state_layers.kernels import causal_conv
from ascend_platform.state_layers.kernels.gated_delta import normalize, rules

COPIED = (*SHARDED_STATES, "tensorizer")
"""Load formats whose tensors have the order of the engine that saved them."""


class NPUGatedDeltaNetAttention(qwen_gdn_linear_attn.QwenGatedDeltaNetAttention):
    """vLLM's layer, which would normalize with a Triton kernel if there are draft tokens.

    Steps with draft tokens are computed by vLLM's methods, and others here.
    """

    keeps_weights = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.enable_fused_gdn_spec_decode = False
        self._columns: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        config = get_current_vllm_config()
        self._has_adapters = config.lora_config is not None
        self._copies_state = config.load_config.load_format in COPIED
        if self.gqa_interleaved_layout:
            self._order_columns()

    @property
    def has_other_order(self) -> bool:
        """Whether parameters have another order than in vLLM."""
        return self.gqa_interleaved_layout and len(self._columns) < 2

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        """Backend of the metadata."""
        return NPUGDNAttentionBackend

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Any, v_dim: int) -> None:
        """Nothing to warm up."""

    def _order_columns(self) -> None:
        """Load Qwen3-Next's projections, which are interleaved by key head, in the order of
        Qwen3.5: queries, keys, values, gates; strengths, decays. Adapters, values that are
        packed across heads, and a state that is copied to the parameters keep the checkpoint's
        order, and each step gathers them."""
        values = self.num_v_heads // self.num_k_heads
        device = torch.get_default_device()
        for name, sizes in {
            "in_proj_qkvz": [self.head_k_dim] * 2 + [values * self.head_v_dim] * 2,
            "in_proj_ba": [values] * 2,
        }.items():
            projection = getattr(self, name)
            heads = self.num_k_heads // self.tp_size
            parameters = [
                (parameter, parameter.shape[parameter.output_dim])
                for parameter in projection.parameters()
                if getattr(parameter, "output_dim", None) is not None
            ]
            packed = [heads * sum(sizes) // columns for _, columns in parameters]
            is_kept = self._has_adapters or self._copies_state
            if is_kept or any(s % each for s in sizes for each in packed):
                self._columns[name] = _flat(heads, sizes).to(device)
                continue
            for (parameter, _), each in zip(parameters, packed, strict=True):
                order = torch.cat(
                    [
                        _flat(heads, [size // each for size in sizes])
                        + rank * heads * sum(sizes) // each
                        for rank in range(self.tp_size)
                    ]
                )
                parameter.weight_loader = _loader(
                    parameter.weight_loader, parameter.output_dim, order
                )

    def process_weights_after_loading(self, _: torch.dtype) -> None:
        """Keep what each step needs of the weights; a reload writes the same memory, which graphs
        read."""
        projections = self.in_proj_qkvz, self.in_proj_ba
        is_plain = all(type(each.quant_method) is UnquantizedLinearMethod for each in projections)
        is_plain = is_plain and not (self._has_adapters or self._columns)
        if is_plain and "projection" not in self._kept:
            weights: list[Any] = [each.weight for each in projections]
            joined = self._kept["projection"] = torch.cat([each.data for each in weights])
            for weight, part in zip(weights, joined.split([len(x) for x in weights]), strict=True):
                weight.data = part
        conv = self._weight
        for name, value in {
            "taps": conv[:, 0].t().float().contiguous(),
            "rates": -self.A_log.float().exp(),
            "biases": self.dt_bias.float(),
            "zero": conv.new_zeros(1, len(conv)),
        }.items():
            self._kept.setdefault(name, torch.empty_like(value)).copy_(value)

    @property
    def _weight(self) -> torch.Tensor:
        weight = self.conv1d.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys, values and gates; strengths and decays."""
        if (joined := self._kept.get("projection")) is not None:
            both = F.linear(hidden_states, joined)
            width = joined.shape[0] - self.in_proj_ba.output_size_per_partition
            return both[:, :width], both[:, width:]
        projected, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if (columns := self._columns.get("in_proj_qkvz")) is not None:
            projected = projected.index_select(1, columns)
        if (columns := self._columns.get("in_proj_ba")) is not None:
            ba = ba.index_select(1, columns)
        return projected, ba

    def forward_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's layer without copies of the projections' parts and of the output."""
        projected, ba = self._project(hidden_states)
        width = (2 * self.key_dim + self.value_dim) // self.tp_size
        mixed, z = projected[:, :width], projected[:, width:]
        z = z.unflatten(-1, (-1, self.head_v_dim))
        if not torch.compiler.is_compiling() and (rows := self._attend(mixed, ba)) is not None:
            output = rows
        else:
            output = torch.zeros(z.shape, dtype=z.dtype, device=z.device)
            torch.ops.vllm.qwen_gdn_attention_core(
                mixed,
                *self.split_ba(ba),
                output,
                layer_name=qwen_gdn_linear_attn._encode_layer_name(self.prefix),
            )
        return self._output_projection(output, z)

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """vLLM's operator in a compiled model."""
        rows = self._attend(mixed_qkv, torch.cat((b, a), -1))
        if rows is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
        else:
            core_attn_out.copy_(rows)

    def _attend(self, mixed: torch.Tensor, ba: torch.Tensor) -> torch.Tensor | None:
        """Outputs of a step without draft tokens, ``[tokens, heads, values]``; None for others."""
        of_layers = get_forward_context().attn_metadata
        metadata: Any = of_layers.get(self.prefix) if isinstance(of_layers, dict) else None
        if metadata is None or metadata.spec_sequence_masks is not None:
            return None
        count = metadata.num_actual_tokens
        is_whole = count == len(mixed)
        if not is_whole:
            mixed, ba = mixed[:count], ba[:count]
        conv = self.kv_cache[0].transpose(-1, -2) if is_conv_state_dim_first() else self.kv_cache[0]
        conv = conv[:, : self.conv_kernel_size - 1]
        attend = self._prefill if metadata.num_prefills else self._decode
        output = attend(mixed, ba, conv, metadata)
        return output if is_whole else F.pad(output, (0, 0, 0, 0, 0, len(mixed) - count))

    def _inputs(self, convolved: torch.Tensor, ba: torch.Tensor) -> GatedDeltaInputs:
        b, a = self.split_ba(ba)
        keys = 2 * self.key_dim // self.tp_size
        qk = convolved[:, :keys].unflatten(-1, (2, -1, self.head_k_dim))
        q, k = normalize(qk.transpose(0, 1))
        v = convolved[:, keys:].unflatten(-1, (-1, self.head_v_dim))
        g = F.softplus(a + self._kept["biases"]) * self._kept["rates"]
        return GatedDeltaInputs(q, k, v, g, b.sigmoid(), self.head_k_dim**-0.5)

    def _decode(
        self,
        mixed: torch.Tensor,
        ba: torch.Tensor,
        conv: torch.Tensor,
        metadata: NPUGDNAttentionMetadata,
    ) -> torch.Tensor:
        """Compute one token of each request. Padding tokens have a decay and a strength of 0, and
        leave the null block's state as it is; the inputs that its convolution keeps are not
        read."""
        blocks = metadata.non_spec_state_indices_tensor
        assert blocks is not None
        blocks = blocks[: len(mixed)]
        window = torch.cat((conv.index_select(0, blocks), mixed[:, None].to(conv.dtype)), 1)
        convolved = F.silu((window * self._kept["taps"]).sum(1, dtype=mixed.dtype))
        conv.index_copy_(0, blocks, window[:, 1:])
        if metadata.padding is not None:
            ba.masked_fill_(metadata.padding[: len(ba)], float("-inf"))
        inputs = self._inputs(convolved, ba)
        return rules.decode(inputs, self.kv_cache[1], blocks, None, None, may_pad=False)

    def _prefill(
        self,
        mixed: torch.Tensor,
        ba: torch.Tensor,
        conv: torch.Tensor,
        metadata: NPUGDNAttentionMetadata,
    ) -> torch.Tensor:
        """Compute decodes, which come first, and prefills."""
        rows, blocks = metadata.rows, metadata.non_spec_state_indices_tensor
        starts = metadata.prefill_query_start_loc
        assert rows is not None
        assert blocks is not None
        history = () if rows.all_new else (conv.index_select(0, blocks).flatten(0, 1),)
        source = torch.cat((mixed.to(conv.dtype), *history, self._kept["zero"]), 0)
        packed, weight = source.index_select(0, rows.order), self._weight
        if packed.dtype == weight.dtype != torch.float32:
            convolved = F.conv1d(packed.t()[None], weight, groups=len(weight))[0].t()
        else:  # A convolution of float32 computes in HF32.
            convolved = causal_conv.convolve(packed[None], weight[:, 0], None, None)[0]
        convolved = F.silu(convolved.index_select(0, rows.outputs).to(mixed.dtype), inplace=True)
        conv.index_copy_(0, blocks, source.index_select(0, rows.last).view(-1, *conv.shape[1:]))
        inputs, states = self._inputs(convolved, ba), self.kv_cache[1]
        decodes, outputs = metadata.num_decodes, []
        if decodes:
            first = _part(inputs, slice(0, decodes))
            outputs.append(rules.decode(first, states, blocks[:decodes], None, None, may_pad=False))
            inputs, blocks = _part(inputs, slice(decodes, None)), blocks[decodes:]
        if rows.all_new:
            before = states.new_zeros(len(blocks), *states.shape[1:])
        else:
            before = states.index_select(0, blocks)
            if rows.new_prefills is not None:
                before.index_fill_(0, rows.new_prefills, 0)
        output, after = rules.prefill(inputs, before, starts)
        states.index_copy_(0, blocks, after.to(states.dtype))
        return torch.cat((*outputs, output)) if outputs else output


def _part(inputs: GatedDeltaInputs, rows: slice) -> GatedDeltaInputs:
    q, k, v, g, beta = (x[rows] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    return GatedDeltaInputs(q, k, v, g, beta, inputs.scale)


def _flat(heads: int, sizes: list[int]) -> torch.Tensor:
    """Columns that are interleaved by head, one part after the other."""
    columns = torch.arange(heads * sum(sizes), device="cpu").view(heads, -1)
    return torch.cat([part.flatten() for part in columns.split(sizes, 1)])


def _loader(load: Callable[..., Any], dimension: int, order: torch.Tensor) -> Callable[..., Any]:
    """A weight loader that orders the checkpoint's rows or columns."""

    def load_ordered(param: Any, loaded_weight: torch.Tensor, *args: Any, **named: Any) -> Any:
        ordered = loaded_weight.index_select(dimension, order.to(loaded_weight.device))
        return load(param, ordered, *args, **named)

    return load_ordered
