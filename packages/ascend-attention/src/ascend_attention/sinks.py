# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Dense attention with attention sinks: one score per head that only adds to the softmax's
denominator (gpt-oss, Granite SWA).

npu_fused_infer_attention_score_v2 takes them as ``learnable_sink``, with bfloat16 and head sizes up
to 128 (``torch_npu/_op_plugin_docs.py``).
"""

from typing import Any, ClassVar

import torch
from ascend_platform import extension

from ascend_attention.dense import (
    FusedAttentionBackend,
    FusedAttentionImpl,
    FusedAttentionMetadataBuilder,
)


class SinkAttentionMetadataBuilder(FusedAttentionMetadataBuilder):
    length_args = ("actual_seq_qlen", "actual_seq_kvlen")


class SinkAttentionImpl(FusedAttentionImpl):
    """Fused attention with sinks, by the kernel's second version, which renames some arguments."""

    title = "the fused attention with attention sinks of ascend-attention"
    serves = FusedAttentionImpl.serves | {extension.AttentionFeature.SINKS}
    operators = ("npu_fused_infer_attention_score_v2", "npu_scatter_pa_kv_cache")
    supports_dcp = False
    int8_cache = False

    def _head_args(self) -> dict[str, Any]:
        return {
            "learnable_sink": self.sinks,
            "num_query_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "softmax_scale": self.scale,
        }


class SinkAttentionBackend(FusedAttentionBackend):
    """Backend of the fused attention with sinks (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16]
    impl_cls, builder_cls = SinkAttentionImpl, SinkAttentionMetadataBuilder
    head_sizes = range(16, 129, 16)
