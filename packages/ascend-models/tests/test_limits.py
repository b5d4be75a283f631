# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of the models that are refused, through vLLM's own configuration."""

from pathlib import Path
from typing import Any

import pytest
from harness.models import deepseek_v4, glm5_next, hybrid, inkling, minimax_m3

REFUSED = (
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "drafts by ngram (mtp serves)",
    ),
    (
        {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"},
        "tensor parallelism over 4 NPUs (o_groups are 2)",
    ),
    ({"enable_lora": True}, "LoRA"),
    (
        {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            "hf_overrides": {"compress_ratios": [0, 4, 128, 4, 4]},
        },
        "MTP layers with compression",
    ),
    ({"kv_offloading_size": 1.0}, "KV connectors, --kv-offloading-size"),
    ({"hf_overrides": {"compress_ratios": [8, 4, 0, 4]}}, "compression by [8]"),
)


def configure(folder: Path, **options: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    given = {"enforce_eager": True, "max_model_len": 1024} | options
    EngineArgs(model=str(folder), skip_tokenizer_init=True, **given).create_engine_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    deepseek_v4.write_config(path)
    return path


def test_an_eager_engine_on_one_npu_is_taken(folder: Path) -> None:
    configure(folder)


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=lambda each: str(each)[:30])
def test_what_is_not_supported_is_refused_in_one_line(
    options: dict[str, Any], named: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match="DeepSeek-V4 in ascend-models") as caught:
        configure(folder, **options)
    line = str(caught.value)
    assert f"does not support {named} yet; fix: leave it out" in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float16"}, "float16 (bfloat16 serves)"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
        ({"enable_lora": True}, "LoRA"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_kimi_linear_does_not_support_is_refused_in_one_line(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    model = hybrid.make("Kimi-Linear", tmp_path)
    with pytest.raises(ValueError, match="Kimi-Linear in ascend-models") as caught:
        configure(model, **options)
    assert f"does not support {named} yet; fix: leave it out" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float16"}, "float16 (bfloat16 serves)"),
        (
            {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"},
            "tensor parallelism over 4 NPUs (num_key_value_heads are 2)",
        ),
        ({"hf_overrides": {"vision_config": {"decoder_dmodel": 128}}}, "images and audio"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_inkling_does_not_support_is_refused_in_one_line(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    inkling.write_config(tmp_path)
    with pytest.raises(ValueError, match="Inkling in ascend-models") as caught:
        configure(tmp_path, tokenizer_mode="hf", **options)
    assert f"does not support {named}" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"language_model_only": False}, "images and videos (--language-model-only serves text)"),
        (
            {"dtype": "float16", "enable_lora": True, "kv_offloading_size": 1.0},
            "float16 (bfloat16 serves), LoRA, KV connectors, --kv-offloading-size",
        ),
        ({"block_size": 64}, "--block-size 64 (128 serves)"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
        (
            {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL"}},
            "graphs of mode FULL (FULL_DECODE_ONLY serves)",
        ),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_minimax_m3_does_not_support_is_refused_in_one_line(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    minimax_m3.write_config(tmp_path)
    with pytest.raises(ValueError, match="MiniMax-M3 in ascend-models") as caught:
        configure(tmp_path, **{"language_model_only": True} | options)
    assert f"does not support {named} yet; fix: leave it out" in str(caught.value)


GLM5_NEXT: dict[str, Any] = {
    "language_model_only": True,
    "dtype": "float16",
    "enable_lora": True,
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "hf_overrides": {
        "text_config": {
            "index_kpool": 12,
            "index_topk": 60,
            "indexer_types": ["full", "shared"] * 2,
        }
    },
}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "images and videos (--language-model-only serves the text)"),
        (
            GLM5_NEXT,
            "float16 (bfloat16 serves), pipeline parallelism, speculative decoding, LoRA,"
            " index_kpool of 12 (divisors of 128 serve), indexer_types of shared (full serves)",
        ),
    ],
    ids=("media", "all others"),
)
def test_what_glm5_next_does_not_support_is_refused_in_one_line(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    glm5_next.write_config(tmp_path)
    with pytest.raises(ValueError, match="GLM-5-next in ascend-models") as caught:
        configure(tmp_path, **options)
    assert f"does not support {named} yet; fix: leave it out" in str(caught.value)
