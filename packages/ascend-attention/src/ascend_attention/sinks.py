"""Attention with sinks, of which each head has one: a score of no key, that only takes part in the sum (gpt-oss, Granite SWA).

npu_fused_infer_attention_score_v2 calls it ``learnable_sink``, and takes bfloat16 and heads of at most 128 with it
(``torch_npu/_op_plugin_docs.py``).
"""

from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension

from ascend_attention.dense import (
    FusedAttentionBackend,
    FusedAttentionImpl,
    FusedAttentionMetadataBuilder,
)
from ascend_attention.metadata import FusedAttentionMetadata


class SinkAttentionMetadataBuilder(FusedAttentionMetadataBuilder):
    names = ("actual_seq_qlen", "actual_seq_kvlen")


class SinkAttentionImpl(FusedAttentionImpl):
    """The computation, by the kernel's second version, whose arguments have names of their own."""

    title = "the fused attention with sinks of ascend-attention"
    serves = FusedAttentionImpl.serves | {extension.AttentionFeature.SINKS}
    supports_dcp = False
    int8_cache = False

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: dict[str, Any],
        block_table: torch.Tensor,
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        attend = {
            "learnable_sink": self.sinks,
            "block_table": block_table,
            "block_size": keys.shape[1],
            "input_layout": "TND",
            "num_query_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "softmax_scale": self.scale,
            **self._seen(meta),
            **lengths,
        }
        tensors = query.contiguous(), keys.view(*keys.shape[:2], -1), values.view(*values.shape[:2], -1)
        if extension.is_captured():
            attend["workspace"] = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(*tensors, **attend)
        with extension.graph_task():
            torch_npu.npu_fused_infer_attention_score_v2.out(*tensors, **attend, out=[output, meta.log_sums])


class SinkAttentionBackend(FusedAttentionBackend):
    """What vLLM asks about the fused attention with sinks (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16]
    impl_cls, builder_cls = SinkAttentionImpl, SinkAttentionMetadataBuilder
    head_sizes = range(16, 129, 16)
