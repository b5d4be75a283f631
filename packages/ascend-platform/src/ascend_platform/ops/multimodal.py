# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Embeddings of images and sounds among those of a prompt, without assignment by a boolean mask."""

import torch
from vllm.model_executor.models import utils
from vllm.multimodal import NestedTensors


def merge_embeddings(
    inputs_embeds: torch.Tensor,
    multimodal_embeddings: NestedTensors,
    is_multimodal: torch.Tensor,
) -> torch.Tensor:
    """Write the embeddings to the rows of ``inputs_embeds`` that the mask names.

    Raises:
        ValueError: their numbers differ.
    """
    if len(multimodal_embeddings) == 0:
        return inputs_embeds
    rows = utils._flatten_embeddings(multimodal_embeddings).to(inputs_embeds.dtype)
    indices = is_multimodal.nonzero().squeeze(-1)
    if len(indices) != len(rows):
        count = utils._embedding_count_expression(multimodal_embeddings)
        raise ValueError(
            f"Attempted to assign {count} = {len(rows)} multimodal tokens to {len(indices)}"
            " placeholders"
        )
    return inputs_embeds.index_copy_(0, indices.to(inputs_embeds.device), rows)
