# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused sparse latent attention on random paged batches, compared with selection and attention in
float64."""

import random
from types import SimpleNamespace

import pytest
import torch
from ascend_attention import sparse_latent
from ascend_attention.latent import LATENT, ROPE
from ascend_platform.extension import RefusedError
from harness.references.latent_batches import SparseLatentBatch
from harness.references.paged_batches import KINDS, pairs
from vllm.config import VllmConfig, set_current_vllm_config


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


def check(batch, padding=0, int8=False, int8_latents=False):
    chosen, output = batch.run_sparse(
        sparse_latent.FusedSparseLatentAttentionBackend, padding, int8, int8_latents
    )
    if int8:
        with pytest.raises(AssertionError):  # The bound tells them from exact keys.
            batch.check_selected(chosen, bound=1e-3)
        batch.quantize_index()
    batch.check_selected(chosen, bound=1e-3)
    bound = 8 * torch.finfo(batch.sizes.dtype).eps
    if int8_latents:
        from_exact = (output.double() - batch.expected_of(chosen)).abs().mean()
        batch.quantize_latents()
        assert (output.double() - batch.expected_of(chosen)).abs().mean() < from_exact / 2
    torch.testing.assert_close(output.double(), batch.expected_of(chosen), atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(4, torch.bfloat16), (6, torch.bfloat16), (1, torch.float16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_latent_attention(heads, dtype, kind):
    """Also contexts with fewer tokens than are selected, and heads that are no power of two."""
    rng = random.Random(f"{heads}{kind}")
    check(
        SparseLatentBatch(
            heads, (LATENT, ROPE), dtype, pairs(kind, rng, rng.randint(2, 5), 300), rng, count=32
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_selection_by_int8_keys(kind):
    torch.manual_seed(0)
    rng = random.Random(kind)
    # With eight decodes, int8 keys select the tokens of exact ones for one seed of fifteen.
    requests = [(new, before + 200) for new, before in pairs(kind, rng, 24, 300)]
    check(SparseLatentBatch(4, (LATENT, ROPE), torch.bfloat16, requests, rng, count=32), int8=True)


@pytest.mark.parametrize(("heads", "dtype"), [(6, torch.bfloat16), (4, torch.float16)])
@pytest.mark.parametrize("kind", KINDS)
def test_int8_latents(heads, dtype, kind):
    torch.manual_seed(0)
    rng = random.Random(kind)
    requests = pairs(kind, rng, 5, 300)
    batch = SparseLatentBatch(heads, (LATENT, ROPE), dtype, requests, rng, count=32)
    check(batch, padding=3, int8_latents=True)


def test_padding_of_a_full_graph_belongs_to_no_request():
    batch = SparseLatentBatch(
        2, (LATENT, ROPE), torch.bfloat16, [(1, 10), (1, 140)], random.Random(3), count=16
    )
    check(batch, padding=6)


@pytest.mark.parametrize(
    ("heads", "latent", "indexer"),
    [
        (129, LATENT, (32, 128, 64)),
        (4, 256, (32, 128, 64)),
        (4, LATENT, (65, 128, 64)),
        (4, LATENT, (32, 64, 64)),
        (4, LATENT, (32, 128, 2049)),
    ],
)
def test_unsupported_shapes_are_refused(heads, latent, indexer):
    names = {
        "kv_lora_rank": latent,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "kv_b_proj": None,
    }
    given = SimpleNamespace(
        **dict(zip(("n_head", "head_dim", "topk_tokens"), indexer, strict=True))
    )
    with pytest.raises(RefusedError, match=r"VLLM_PLUGINS=ascend"):
        sparse_latent.FusedSparseLatentAttentionImpl(
            heads, latent + ROPE, 1.0, 1, indexer=given, **names
        )
