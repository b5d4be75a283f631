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
    for capability in ("top_k_top_p", "mc2"):
        assert {family.name for family in chips.FAMILIES if getattr(family, capability)} == served
    assert {
        family.name for family in chips.FAMILIES if not family.lacks(*chips.ALL_OPERATORS)
    } == served


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
        ("Ascend950PR_9599", "bfloat16", ["npu_fused_infer_attention_score", "npu_mrope"]),
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
        "npu_fused_infer_attention_score": "aclnnFusedInferAttentionScoreV3",
        "npu_scatter_pa_kv_cache": "aclnnScatterPaKvCache",
        "npu_add_rms_norm": "aclnnAddRmsNorm",
        "npu_fusion_attention": "aclnnFlashAttentionVarLenScoreV4",
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
        missing = {name for name, called in names.items() if called in chip.lacks}
        assert missing <= set(family.lacks(*names))
        assert ("npu_sparse_flash_attention" in missing) != chip.bfloat16
