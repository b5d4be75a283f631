# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Dense decoder attention on Ascend 310P by ATB's operators, which read a KV cache in FRACTAL_NZ.

Which operators, formats and limits are right there is known from vllm-ascend
(``vllm_ascend/_310p/attention``); their arguments are those of torch_npu's schemas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

FRACTAL_NZ = 29
COLUMNS = 16
"""Of a fractal in 16-bit types."""

BLOCK_SIZE = 128
LARGEST_HEAD = 128
"""The operators take blocks of up to 128 * 128 elements of a head."""

MASK_SIZE, HIDDEN = 2048, -10000.0
COMPRESSED = 5
"""``mask_type`` of the operator for several queries: the mask of MASK_SIZE tokens stands for any
length."""


@dataclass
class FractalAttentionMetadata(AttentionMetadata):
    """Metadata of one step.

    Attributes:
        num_tokens: query tokens of all requests.
        query_lens: int32 ``[requests]`` on the host, query tokens of each request; None if each is
            one token.
        seq_lens: int32 ``[requests]`` on the NPU, after this step's tokens are written.
        block_table: int32 ``[requests, blocks]``.
        slots: int32 ``[num_tokens]``, the KV cache slot of each new key.
        mask: float16 ``[MASK_SIZE, MASK_SIZE]``.
    """

    num_tokens: int
    query_lens: torch.Tensor | None
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


class FractalAttentionMetadataBuilder(AttentionMetadataBuilder[FractalAttentionMetadata]):
    """Builds a step's metadata on the host, without waiting for the NPU."""

    # The operators take the numbers of query tokens from the host when they are launched.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        hidden = torch.full((MASK_SIZE, MASK_SIZE), HIDDEN, dtype=torch.float16, device="cpu")
        self.mask = hidden.triu(1).to(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FractalAttentionMetadata:
        """See the class."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                f"{FractalAttentionImpl.title} supports causal attention of all requests"
            )
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        num_tokens = int(starts[-1])
        return FractalAttentionMetadata(
            num_tokens=num_tokens,
            query_lens=starts.diff().int() if common.max_query_len > 1 else None,
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor,
            slots=common.slot_mapping[:num_tokens].int(),
            mask=self.mask,
        )


class FractalAttentionImpl(extension.AttentionImplBase, AttentionImpl[FractalAttentionMetadata]):
    """Fused attention of Ascend 310P; see ``extension.AttentionImplBase`` for the constructor."""

    title = "the attention of ascend-attention over a KV cache in FRACTAL_NZ"
    operators = ("_npu_paged_attention_splitfuse_v2",)
    borrows_part = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._aliases: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def bind(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Make the tensors in FRACTAL_NZ; each first has its own memory."""
        for part in kv_cache:
            self._fractal(part)
            torch.npu.empty_cache()

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        meta: FractalAttentionMetadata,
    ) -> None:
        """Write by _npu_reshape_and_cache; see the base class."""
        tokens = slice(meta.num_tokens)
        new = key[tokens].contiguous(), value[tokens].contiguous()
        torch_npu._npu_reshape_and_cache(*new, *map(self._fractal, kv_cache), meta.slots)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        meta: FractalAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """See the base class; query and output are float16, and the KV cache is the memory of
        ``[blocks, 128, kv_heads, head_size]`` each, which has the order of FRACTAL_NZ."""
        tokens = slice(meta.num_tokens)
        key_cache, value_cache = map(self._fractal, kv_cache)
        arguments = {
            "query": query[tokens].contiguous(),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": meta.block_table,
            "context_lens": meta.seq_lens,
            "num_kv_heads": self.num_kv_heads,
            "num_heads": self.num_heads,
            "scale_value": self.scale,
            "out": output[tokens],
        }
        if meta.query_lens is None:
            torch_npu._npu_paged_attention(**arguments)
        else:
            torch_npu._npu_paged_attention_splitfuse_v2(
                **arguments, mask=meta.mask, seq_len=meta.query_lens, mask_type=COMPRESSED
            )

    def _fractal(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache's memory as ``[blocks, kv_heads * head_size / 16, block_size, 16]`` in
        FRACTAL_NZ. A view cannot have a format, so another tensor is given the memory."""
        known = cache.data_ptr(), cache.shape
        if (alias := self._aliases.get(known)) is None:
            blocks, block_size, heads, size = cache.shape
            alias = torch_npu.empty_with_format(
                (blocks, heads * size // COLUMNS, block_size, COLUMNS),
                dtype=cache.dtype,
                device=cache.device,
                acl_format=FRACTAL_NZ,
            )
            torch_npu.npu_change_data_ptr(alias, cache, cache.storage_offset())
            self._aliases[known] = alias
        return alias


class FractalAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """Fused attention backend of Ascend 310P (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.float16]
    impl_cls, builder_cls = FractalAttentionImpl, FractalAttentionMetadataBuilder
    block_sizes: ClassVar = [BLOCK_SIZE]
    head_sizes = range(COLUMNS, LARGEST_HEAD + 1, COLUMNS)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: connectors divide blocks by heads in the order of other chips."""
        return False
