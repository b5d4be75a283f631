# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Vision-language models through vLLM's engine, compared with Hugging Face transformers.

Prompts with images of several sizes, one with more tokens than a step has, and with a video, each
twice, the second time from the prefix cache except with drafts. `tools/check architectures` compares more models.
One engine more gets requests as a server does (``harness.media_service``).
"""

import math
from pathlib import Path
from typing import Any

import pytest
from harness import media_service, model_types, multimodal, npus

MTP: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
MTP |= {"enable_prefix_caching": False}
# Name: (model type, NPUs, dtype, options, largest mean difference).
CASES: dict[str, tuple[str, int, str, dict[str, Any], float]] = {
    "qwen2.5-vl": ("qwen2_5_vl", 2, "bfloat16", {}, 0.03),
    "qwen3-vl-moe": ("qwen3_vl_moe", 1, "bfloat16", {}, 0.03),
    "gemma3": ("gemma3", 1, "bfloat16", {}, 0.03),
    "qwen3.5": ("qwen3_5", 1, "float32", MTP, 1e-4),
}


SERVICE: dict[str, Any] = {
    "mm_encoder_tp_mode": "data",
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("multimodal")
    found = {
        name: multimodal.case(name, kind, directory / name, ranks, dtype, engine)
        for name, (kind, ranks, dtype, engine, _) in CASES.items()
    }
    model, adapter = directory / "service", str(directory / "adapter")
    service = multimodal.case("service", "qwen2_5_vl", model, 2, "float32", SERVICE)
    media_service.adapter(model, Path(adapter))
    return found | {"service": service | {"task": "service", "adapter": adapter}}


@pytest.fixture(scope="module")
def results(cases: dict[str, Any]) -> dict[str, Any]:
    return npus.by_name(model_types.run(list(cases.values())))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    name: str, cases: dict[str, Any], results: dict[str, Any]
) -> None:
    kind, _, dtype, _, bound = CASES[name]
    assert results[name]["alike"], "ranks have other answers"
    logits = multimodal.reference(kind, Path(cases[name]["model"]), dtype)
    found = multimodal.compare(logits, results[name]["results"])
    print(f"{name}: {found}")
    assert len(results[name]["results"]) == 2 * len(cases[name]["prompts"])
    assert found["mean"] < bound


@pytest.fixture(scope="module")
def service(results: dict[str, Any]) -> dict[str, Any]:
    assert results["service"]["alike"], "ranks have other answers"
    (found,) = results["service"]["results"]
    return dict(found)


def test_a_batch_with_and_without_images(cases: dict[str, Any], service: dict[str, Any]) -> None:
    logits = multimodal.reference("qwen2_5_vl", Path(cases["service"]["model"]))
    assert multimodal.compare(logits, service["mixed"])["most"] < 1e-3
    assert len(service["mixed"]) == media_service.BATCH


def test_adapters_on_the_language_model_and_the_encoder(
    cases: dict[str, Any], service: dict[str, Any]
) -> None:
    paths = Path(cases["service"]["model"]), Path(cases["service"]["adapter"])
    logits = multimodal.reference("qwen2_5_vl", paths[0], adapter=paths[1])
    assert multimodal.compare(logits, service["adapter"])["most"] < 1e-3
    assert service["adapter"] != service["mixed"][: len(service["adapter"])]


def test_chat_with_base64_images_and_videos(service: dict[str, Any]) -> None:
    for number, answer in service["chat"].items():
        assert answer["tokens"] == service["mixed"][int(number)]["tokens"]
        assert answer["logprobs"] == pytest.approx(
            service["mixed"][int(number)]["logprobs"], abs=1e-4
        )
    assert len(service["chat"]) == 3
    for answer in service["video"]:
        assert len(answer["tokens"]) == 6
        assert all(math.isfinite(each) for each in answer["logprobs"])


def test_structured_output_about_images(service: dict[str, Any]) -> None:
    assert len(service["grammar"]) == len(multimodal.LENGTHS)
    assert set(service["grammar"]) <= set(media_service.CHOICES)


@pytest.mark.parametrize("name", media_service.unusual())
def test_unusual_images_are_answered_or_refused(name: str, service: dict[str, Any]) -> None:
    """A refusal ends its request, and the engine serves the next."""
    found = service["unusual"][name]
    assert isinstance(found, str) == (name in media_service.BROKEN), found
    if not isinstance(found, str):
        assert all(math.isfinite(each) for each in found["logprobs"])
    assert service["last"]["tokens"] == service["mixed"][0]["tokens"]
