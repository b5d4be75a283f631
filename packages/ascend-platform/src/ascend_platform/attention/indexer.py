# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Indexers of sparse latent attention (DSA: DeepSeek-V3.2, GLM-5): keys in the model's dtype, and
the selection of tokens. Int8 KV caches of the attention and of its indexers are installed here too.

vLLM's Indexer (``vllm/model_executor/models/deepseek_v2.py``) quantizes to float8, which Atlas A2
and A3 do not have. Its parameters and their loaders stay; :func:`install` replaces its computation
and its KV cache layer. The kernels are those of the attention's implementation
(``SparseLatentAttentionImplBase``).
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ascend_platform import chips, host
from ascend_platform.attention.kv_cache import IndexCache, QuantizedLatentAttention
from ascend_platform.config.compilation import INDEXER_OP
from ascend_platform.errors import RefusedError

LATENT_OPERATOR = "npu_kv_quant_sparse_flash_attention"
INT8_OPERATOR = "npu_quant_lightning_indexer"
MAX_INT8_TOPK = 2048
"""Tokens that it selects."""


class NPUIndexer(Indexer):
    """vLLM's Indexer without quantization.

    Scores are not scaled, as a positive factor leaves the order of the keys as it is.
    """

    k_cache: IndexCache  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
    ) -> torch.Tensor:
        """Store the keys of the step's tokens, and select the tokens that each attends to.

        Args:
            hidden_states: ``[tokens, hidden_size]``.
            qr: the normalized latent of the query, ``[tokens, q_lora_rank]``.

        Returns:
            ``topk_indices_buffer``, whose first rows are written.
        """
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        projected = self.wk_weights_proj(hidden_states)[0]
        key, weights = projected.split([self.head_dim, self.n_head], -1)
        query, key = self._rotate(positions, query, self.k_norm(key), rotary_emb)
        selected: Any = self.topk_indices_buffer
        select = torch.ops.vllm.npu_sparse_indexer
        select(query, key, weights.contiguous(), selected, self.k_cache.prefix)
        return selected

    def _rotate(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, rotary_emb: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first ``rope_dim`` elements of the heads."""
        rotate_first = getattr(rotary_emb, "rotate_first", None)
        if rotate_first and (rotated := rotate_first(positions, query, key, self.head_dim)):
            return rotated
        first = rotary_emb(positions, query[..., : self.rope_dim], key[:, None, : self.rope_dim])
        query, key = (
            torch.cat((turned.reshape(*each.shape[:-1], -1), each[..., self.rope_dim :]), -1)
            for turned, each in zip(first, (query, key), strict=True)
        )
        return query, key


def sparse_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    selected: torch.Tensor,
    layer_name: str,
) -> None:
    """Store keys and select tokens; nothing in a run without metadata, as vLLM's profiling run."""
    metadata, cache, kv_cache, _ = get_attention_context(layer_name)
    if metadata is None:
        return
    tokens = metadata.num_actual_tokens
    pages = kv_cache if cache.is_int8 else kv_cache.index
    # With prefill context parallelism the slots are those of all ranks' tokens and padding.
    (new,) = cache.impl.gather_new(key) if cache.impl.pcp_world_size > 1 else (key[:tokens],)
    cache.impl.write_index(new, pages, metadata)
    if tokens:
        cache.impl.select(query[:tokens], weights[:tokens], pages, metadata, selected[:tokens])


direct_register_custom_op(
    op_name=INDEXER_OP.removeprefix("vllm::"),
    op_func=sparse_indexer,
    mutates_args=["selected"],
    fake_impl=lambda query, key, weights, selected, layer_name: None,
    dispatch_key=current_platform.dispatch_key,
)


def install(layers: dict[str, Any], is_int8: bool = False) -> None:
    """Replace the indexers of all layers, and their KV cache layers in vLLM's
    ``static_forward_context``.

    Args:
        is_int8: keys are int8 in the cache.

    Raises:
        RefusedError: a pipeline stage begins with a layer that uses the selection of an earlier
            one, or int8 keys are not supported.
    """
    sparse = _sparse(layers)
    if is_int8 and not sparse:
        raise _refused("index_cache", "a model without sparse latent attention", INT8_OPERATOR)
    first = next(iter(sparse), "")
    if first and sparse[first].indexer is None:
        raise RefusedError(
            f"{first} uses the tokens that the indexer of an earlier layer selects, which is on"
            " another pipeline stage; fix: VLLM_PP_LAYER_PARTITION with stages that begin with a"
            " layer that has an indexer"
        )
    for layer in sparse.values():
        indexer = layer.indexer
        if indexer is not None and type(indexer) is Indexer:
            prefix = indexer.k_cache.prefix
            if is_int8:
                _check_int8(layer.impl, indexer)
            cache: Any = IndexCache(prefix, indexer.head_dim, layer, is_int8)
            layers[prefix] = indexer.k_cache = cache
            indexer.__class__ = NPUIndexer


def _check_int8(impl: Any, indexer: Indexer) -> None:
    is_offered = getattr(impl, "takes_int8_index", False)
    if (
        is_offered
        and not host.chip_family().lacks(INT8_OPERATOR)
        and indexer.topk_tokens <= MAX_INT8_TOPK
    ):
        return
    tokens = f"{indexer.topk_tokens} selected tokens"
    raise _refused("index_cache", tokens, INT8_OPERATOR, f" for at most {MAX_INT8_TOPK}")


def quantize_latents(layers: dict[str, Any]) -> None:
    """Give layers of sparse latent attention, of vLLM's ``static_forward_context``, an int8 KV
    cache.

    Raises:
        RefusedError: there are none, or the chip or their attention does not support it.
    """
    sparse = _sparse(layers)
    is_offered = all(getattr(layer.impl, "takes_int8_latents", False) for layer in sparse.values())
    if not sparse or not is_offered or host.chip_family().lacks(LATENT_OPERATOR):
        model = f"a model {'with' if sparse else 'without'} sparse latent attention"
        raise _refused("latent_cache", model, LATENT_OPERATOR)
    for layer in sparse.values():
        layer.__class__ = QuantizedLatentAttention


def _sparse(layers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, MLAAttention) and layer.use_sparse
    }


def _refused(option: str, found: str, operator: str, limit: str = "") -> RefusedError:
    families = [each.name for each in chips.FAMILIES if not each.lacks(operator)]
    return RefusedError(
        f"ascend.platform.{option} is int8 for {found} on {host.chip()}; the fused sparse latent"
        f" attention of ascend-attention supports it{limit} on {', '.join(families)}; fix: remove"
        " it"
    )
