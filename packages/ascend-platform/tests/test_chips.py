# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The table of chip families, by the chips' names that torch_npu knows."""

import re
from pathlib import Path

import pytest
from ascend_platform import chips, extension


@pytest.mark.parametrize(
    ("chip", "family", "streams"),
    [
        ("Ascend910B1", "Atlas A2", 1984),
        ("Ascend910B2C", "Atlas A2", 1984),
        ("Ascend910B4-1", "Atlas A2", 1984),
        ("Ascend910_9391", "Atlas A3", 1984),
        ("Ascend310P3", "Ascend 310P", 1024),
        ("Ascend910ProB", "Ascend 910A", 1984),
        ("Ascend910B", "Ascend 910A", 1984),  # of the first generation
        ("Ascend950PR_9599", "Ascend 950", 1984),
        ("Ascend310B1", "unknown", 1984),
        ("", "unknown", 1984),
    ],
)
def test_family_and_streams(chip: str, family: str, streams: int) -> None:
    chip_family = chips.family_of(chip)
    assert (chip_family.name, chip_family.streams) == (family, streams)
    assert extension.Chip(chip, 0, 0, 0).family is chip_family


def test_operators_that_only_atlas_a2_and_a3_have() -> None:
    served = {"Atlas A2", "Atlas A3"}
    assert {family.name for family in chips.FAMILIES if family.top_k_top_p} == served
    assert {
        family.name for family in chips.FAMILIES if not family.lacks(*chips.ALL_OPERATORS)
    } == served


def test_experts_are_served_on_ascend950() -> None:
    family = chips.family_of("Ascend950PR_9599")
    assert family.moe_routing
    assert family.token_unpermute
    assert family.mc2
    assert family.mc2.default.expert_scales
    assert not family.lacks("npu_moe_gating_top_k", "npu_moe_init_routing_v2")


@pytest.mark.parametrize(
    ("chip", "dtype", "lacking"),
    [
        ("Ascend910B3", "bfloat16", []),
        ("Ascend310P3", "float16", ["npu_fused_infer_attention_score", "npu_mrope"]),
        (
            "Ascend910A",
            "float16",
            ["npu_add_rms_norm", "npu_fused_infer_attention_score", "npu_mrope"],
        ),
        ("Ascend950PR_9599", "bfloat16", ["npu_mrope"]),
        (
            "Ascend310B1",
            "float16",
            ["npu_add_rms_norm", "npu_fused_infer_attention_score", "npu_mrope"],
        ),
    ],
)
def test_preferred_dtype_and_operators(chip: str, dtype: str, lacking: list[str]) -> None:
    family = chips.family_of(chip)
    assert family.dtypes[0] == dtype
    assert (
        family.lacks("npu_add_rms_norm", "npu_fused_infer_attention_score", "npu_mrope") == lacking
    )


def test_the_product_names_no_chip_elsewhere() -> None:
    """`chips.py` is the one table."""
    sources = Path(chips.__file__).parent
    assert [
        path.name
        for path in sources.rglob("*.py")
        if re.search(r"Ascend(910|310|950)", path.read_text())
    ] == ["chips.py"]


def test_emulated_chips_lack_what_the_table_says() -> None:
    """By the operators that the emulator refuses on a chip; the table may lack more, which vLLM
    computes by itself then."""
    names = {
        "npu_scatter_pa_kv_cache": "aclnnScatterPaKvCache",
        "npu_add_rms_norm": "aclnnAddRmsNorm",
        "npu_gemma_rms_norm": "aclnnGemmaRmsNorm",
        "npu_moe_gating_top_k": "aclnnMoeGatingTopK",
        "npu_mrope": "aclnnRopeWithSinCosCacheV2",
        "npu_lightning_indexer": "aclnnLightningIndexer",
        "npu_sparse_flash_attention": "aclnnSparseFlashAttention",
    }
    emulated = pytest.importorskip("ascend_emulator.chips").chips()
    for key, chip in emulated.items():
        family = chips.family_of(key)
        assert chip.bfloat16 == ("bfloat16" in family.dtypes)
        assert chip.streams == family.streams
        # torch_npu calls other versions of these on Ascend950.
        new = key.startswith("Ascend950")
        names["npu_fused_infer_attention_score"] = (
            f"aclnnFusedInferAttentionScoreV{5 if new else 3}"
        )
        names["npu_fusion_attention"] = f"aclnnFlashAttention{'' if new else 'VarLen'}ScoreV4"
        missing = {name for name, called in names.items() if called in chip.lacks}
        assert missing <= set(family.lacks(*names))
        assert ("npu_sparse_flash_attention" in missing) != chip.bfloat16
