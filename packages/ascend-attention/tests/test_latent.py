# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused latent attention on random paged batches, compared with softmax(q k^T) v in float64."""

import random
from types import SimpleNamespace

import pytest
import torch
from ascend_attention import latent
from ascend_platform.attention import length_bounds
from ascend_platform.extension import RefusedError
from harness.references.latent_batches import LatentBatch
from harness.references.paged_batches import KINDS, pairs
from vllm.config import VllmConfig, set_current_vllm_config

WIDTHS = latent.LATENT, latent.ROPE


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


def check(batch, common=None):
    output = batch.run(latent.FusedLatentAttentionBackend, common=common)
    bound = 8 * torch.finfo(batch.sizes.dtype).eps
    torch.testing.assert_close(output.double(), batch.expected(), atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(4, torch.bfloat16), (6, torch.bfloat16), (1, torch.float16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention(heads, dtype, kind):
    """Also prompts of more tokens than the kernel takes of a request, and heads that are no power
    of two."""
    rng = random.Random(f"{heads}{kind}")
    check(LatentBatch(heads, WIDTHS, dtype, pairs(kind, rng, rng.randint(2, 5), 300), rng))


def test_128_heads():
    """DeepSeek-V3's with data-parallel attention: decodes, and a decode with draft tokens."""
    requests = [(1, 200), (1, 0), (4, 40), (20, 7)]
    check(LatentBatch(128, WIDTHS, torch.bfloat16, requests, random.Random(1)))


def test_more_requests_than_a_call_of_the_kernel_takes(monkeypatch):
    monkeypatch.setattr(latent, "MAX_REQUESTS", 5)
    check(
        LatentBatch(
            2,
            WIDTHS,
            torch.bfloat16,
            [(40, 3), (1, 130), (70, 0), (16, 1), (1, 0)],
            random.Random(1),
        )
    )


@pytest.mark.parametrize(
    ("ends", "parts"),
    [
        ([1, 18, 18], [(0, 1, 0), (1, 17, 1), (1, 18, 0), (2, 18, 0)]),
        ([32], [(0, 16, 16), (0, 32, 0)]),
    ],
)
def test_requests_are_cut_into_parts_of_16_tokens(ends, parts):
    assert latent.cut(ends, 16) == [latent.Part(*part) for part in parts]


def test_draft_tokens_in_flight():
    """The host knows only upper bounds of the sequence lengths; those on the device are exact."""
    rng, drafts = random.Random(2), [3, 0, 1]
    batch = LatentBatch(4, WIDTHS, torch.bfloat16, [(1, 130), (1, 5), (1, 127)], rng)
    common = batch.common()
    common.seq_lens_cpu_upper_bound = torch.tensor(batch.lengths, dtype=torch.int32) + torch.tensor(
        [2, 0, 1]
    )
    with length_bounds.subtract_rejected(
        length_bounds.Rejected(lambda: pytest.fail("waits for the device"), drafts)
    ):
        check(batch, common)


def test_padding_of_a_full_graph_goes_to_dummy_requests():
    batch = LatentBatch(2, WIDTHS, torch.bfloat16, [(1, 10), (1, 20)], random.Random(3))
    common = batch.common()
    common.num_reqs, common.num_actual_tokens = 4, 4
    common.query_start_loc_cpu = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    common.seq_lens_cpu_upper_bound = torch.tensor([11, 21, 0, 0], dtype=torch.int32)
    builder = latent.LatentMetadataBuilder(
        SimpleNamespace(dtype=torch.bfloat16), [], VllmConfig(), torch.device("npu")
    )
    meta = builder.build(0, common)
    assert {name: list(lengths) for name, lengths in meta.lengths.items()} == {
        "actual_seq_qlen": [1, 2, 3, 4],
        "actual_seq_kvlen": [11, 21, 1, 1],
    }
    assert meta.mask is None


@pytest.mark.parametrize(("heads", "widths"), [(4, (256, 64)), (4, (512, 32)), (129, (512, 64))])
def test_unsupported_shapes_are_refused(heads, widths):
    names = {
        "kv_lora_rank": widths[0],
        "qk_rope_head_dim": widths[1],
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    with pytest.raises(RefusedError, match=r"VLLM_PLUGINS=ascend"):
        latent.FusedLatentAttentionImpl(heads, sum(widths), 1.0, 1, kv_b_proj=None, **names)
