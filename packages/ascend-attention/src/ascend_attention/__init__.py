# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention backends for vLLM on CANN's fused attention kernels."""

from ascend_platform import extension


def register() -> None:
    """Offer the fused attention backends to ascend-platform; never raises.

    Entry point of the group ``vllm.general_plugins``. vLLM calls it in every process, possibly more
    than once.
    """
    extension.join("ascend-attention", "ascend_attention", _offer, api="1.7")


def _offer() -> None:
    extension.offer("attention.dense", "ascend_attention.dense.FusedAttentionBackend")
    extension.offer("attention.dense_fractal", "ascend_attention.fractal.FractalAttentionBackend")
    extension.offer("attention.gated_delta", "ascend_attention.gated_delta.FusedGatedDeltaRule")
    extension.offer("attention.latent", "ascend_attention.latent.FusedLatentAttentionBackend")
    extension.offer("attention.latent_layer", "ascend_attention.prolog.FusedLatentLayer")
    extension.offer(
        "attention.latent_sparse",
        "ascend_attention.sparse_latent.FusedSparseLatentAttentionBackend",
    )
    extension.offer("attention.sinks", "ascend_attention.sinks.SinkAttentionBackend")
    extension.offer("attention.encoder", "ascend_attention.encoder.FusedEncoderAttentionBackend")
    extension.offer("attention.vision", "ascend_attention.encoder.FusedMMEncoderAttention")
