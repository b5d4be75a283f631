# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Embeddings of images in those of a prompt, compared with vLLM's."""

import pytest
import torch
from ascend_platform.ops.multimodal import merge_embeddings
from vllm.model_executor.models import utils


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_embeddings_are_merged_as_by_vllm(device: str) -> None:
    prompt, images = torch.randn(9, 8).half(), [torch.randn(2, 8), torch.randn(1, 8)]
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0]).bool()
    expected = utils._merge_multimodal_embeddings(prompt.clone(), images, mask)
    ours = prompt.npu()
    merged = merge_embeddings(ours, [image.npu() for image in images], mask.to(device))
    assert merged is ours
    assert torch.equal(ours.cpu(), expected)
    assert merge_embeddings(ours, [], mask) is ours
    with pytest.raises(ValueError, match=r"assign 2 = 2 multimodal tokens to 3 placeholders"):
        merge_embeddings(ours, [images[0].npu()], mask.to(device))
