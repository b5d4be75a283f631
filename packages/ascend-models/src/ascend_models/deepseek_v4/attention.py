# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4's attention: a window of keys that are values too, compressed entries beyond it, and
sinks.

The module has the names and shapes of the parameters of vLLM's DeepseekV4Attention, so that vLLM's
loader of weights fits, but of the sinks: what vLLM loads under their name is not loaded again after
sleep. Its KV cache layers are :class:`~ascend_models.common.rows.RowCache`, in the
model's dtype; in vLLM they are of float8, or of bfloat16 by a CUDA kernel.
"""

from typing import Any

import torch
import torch_npu
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope

from ascend_models.common.compressor import Compressor
from ascend_models.common.indexer import CompressedIndexer, all_rows
from ascend_models.common.rotary import rotate
from ascend_models.common.rows import RowCache, RowsMetadata, page_bytes
from ascend_models.common.sparse_attention import attend

SINKS = WeightsMapper(orig_to_new_suffix={".attn_sink": ".sinks"})
"""From the checkpoint's names."""


class NPUDeepseekV4Attention(torch.nn.Module):
    """One layer's attention; its ratio is 1 (window only), 4 (with an indexer) or 128."""

    ones: torch.Tensor

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        topk_indices_buffer: torch.Tensor | None = None,
    ) -> None:
        """Take the arguments of vLLM's DeepseekV4CPUAttention; the buffer is not used."""
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        ranks, dtype = get_tensor_model_parallel_world_size(), vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self.heads, self.head_dim = config.num_attention_heads // ranks, config.head_dim
        self.groups, self.group_rank = config.o_groups // ranks, config.o_lora_rank
        self.latent_dim, self.window = config.q_lora_rank, config.sliding_window
        self.scale, self.eps = self.head_dim**-0.5, config.rms_norm_eps
        self.ratio = max(1, config.compress_ratios[extract_layer_index(prefix)])
        self.register_buffer("ones", torch.ones(self.head_dim, dtype=dtype), persistent=False)
        self.sinks = torch.nn.Parameter(
            torch.full((self.heads,), -torch.inf, dtype=torch.float32), requires_grad=False
        )
        set_weight_attrs(self.sinks, {"weight_loader": sharded_weight_loader(0)})
        self.fused_wqa_wkv = MergedColumnParallelLinear(
            config.hidden_size,
            [self.latent_dim, self.head_dim],
            bias=False,
            return_bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.fused_wqa_wkv",
            disable_tp=True,
        )
        self.q_norm = RMSNorm(self.latent_dim, self.eps)
        self.kv_norm = RMSNorm(self.head_dim, self.eps)
        width, inner = config.num_attention_heads * self.head_dim, config.o_groups * self.group_rank
        named: dict[str, Any] = {"bias": False, "return_bias": False, "quant_config": quant_config}
        self.wq_b = ColumnParallelLinear(self.latent_dim, width, prefix=f"{prefix}.wq_b", **named)
        self.wo_a = ColumnParallelLinear(
            width // config.o_groups, inner, prefix=f"{prefix}.wo_a", **named
        )
        self.wo_b = RowParallelLinear(inner, config.hidden_size, prefix=f"{prefix}.wo_b", **named)
        self.rotary_emb = build_deepseek_v4_rope(
            config,
            head_dim=self.head_dim,
            rope_head_dim=config.qk_rope_head_dim,
            max_position_embeddings=config.max_position_embeddings,
            compress_ratio=self.ratio,
        )
        page = page_bytes(self.head_dim, dtype)
        self.window_cache = RowCache(
            f"{prefix}.swa_cache", self.head_dim, dtype, page, window=self.window
        )
        self.compressor: Compressor | None = None
        self.indexer: CompressedIndexer | None = None
        self.compressed_cache: RowCache | None = None
        if self.ratio > 1:
            self.compressed_cache = RowCache(prefix, self.head_dim, dtype, page, ratio=self.ratio)
            self.compressor = Compressor(
                config.hidden_size,
                self.head_dim,
                self.ratio,
                self.compressed_cache,
                self.eps,
                f"{prefix}.compressor",
            )
        if self.ratio == 4:
            self.indexer = CompressedIndexer(
                config, self.ratio, dtype, page, quant_config, f"{prefix}.indexer"
            )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            positions: int64 ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            llama_4_scaling: not used.

        Returns:
            ``[tokens, hidden_size]``; in a run without metadata, as vLLM's profiling run, the values
            have no meaning.
        """
        table = self.rotary_emb.cos_sin_cache
        cos_sin = table[positions]
        latent, kv = self.fused_wqa_wkv(hidden_states).split([self.latent_dim, self.head_dim], -1)
        latent = self.q_norm(latent.contiguous())
        kv = rotate(self.kv_norm(kv.contiguous()), cos_sin)
        query = self.wq_b(latent).view(-1, self.heads, self.head_dim)
        query = rotate(torch_npu.npu_rms_norm(query, self.ones, self.eps)[0], cos_sin)
        attended = query
        if get_forward_context().attn_metadata is not None:
            attended = torch.zeros_like(query)
            self._attend(hidden_states, latent, query, kv, positions, table, attended)
        return self._project(rotate(attended, cos_sin, inverse=True))

    def _attend(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Store the step's rows and attend to what each token sees."""
        metadata: Any = get_forward_context().attn_metadata
        meta: RowsMetadata = metadata[self.window_cache.prefix]
        tokens = meta.num_tokens
        if not tokens:
            return
        own = positions[:tokens]
        self.window_cache.rows.index_copy_(0, meta.slot_mapping, kv[:tokens])
        seen = meta.once(f"window of {self.window}", lambda: meta.last(own, self.window))
        selected = [(self.window_cache.rows, seen)]
        if self.compressor is not None:
            assert self.compressed_cache is not None
            self.compressor(hidden_states, positions, table)
            compressed: RowsMetadata = metadata[self.compressed_cache.prefix]
            rows: torch.Tensor | None = None
            if self.indexer is not None:
                rows = self.indexer(hidden_states, latent, positions, table)
            if rows is not None:
                selected.append((self.compressed_cache.rows, compressed.slots(rows)))
            elif most := compressed.longest // self.ratio:
                visible = (own + 1) // self.ratio
                slots = compressed.once(
                    f"all of {self.ratio}", lambda: compressed.slots(all_rows(visible, most))
                )
                selected.append((self.compressed_cache.rows, slots))
        output[:tokens] = attend(query[:tokens], selected, self.sinks, self.scale)

    def _project(self, attended: torch.Tensor) -> torch.Tensor:
        """The grouped output projection of ``[tokens, heads, head_dim]``."""
        grouped = attended.reshape(len(attended), self.groups, -1).transpose(0, 1)
        weight: Any = self.wo_a.weight
        matrices = weight.view(self.groups, self.group_rank, -1).transpose(1, 2)
        inner = torch.bmm(grouped, matrices).transpose(0, 1)
        return self.wo_b(inner.reshape(len(attended), -1))
