# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Vision-language models through vLLM's engine, compared with Hugging Face transformers.

Prompts with images of several sizes, one with more tokens than a step has, and with a video, each
twice, the second time from the prefix cache except with drafts. `tools/check architectures` compares more models.
One engine more gets requests as a server does (``harness.engines.media_service``), and engines of processes
serve them in layouts.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.compare import layouts, model_types
from harness.engines import media_service, npus
from harness.references import multimodal

MTP: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
MTP |= {"enable_prefix_caching": False}
IN_GRAPHS: dict[str, Any] = {
    "max_num_batched_tokens": 256,  # Several images are encoded in one step.
    "compilation_config": {
        "cudagraph_mm_encoder": True,
        # The largest image has more tokens.
        "encoder_cudagraph_token_budgets": [4, 16, 64],
    },
}
# Name: (model type, NPUs, dtype, options, largest mean difference).
CASES: dict[str, tuple[str, int, str, dict[str, Any], float]] = {
    "qwen2.5-vl": ("qwen2_5_vl", 2, "bfloat16", {}, 0.03),
    "qwen2.5-vl in graphs": ("qwen2_5_vl", 1, "float32", IN_GRAPHS, 1e-4),
    "qwen3-vl in graphs": (
        *("qwen3_vl", 2, "bfloat16"),
        IN_GRAPHS | {"mm_encoder_tp_mode": "data"},
        0.03,
    ),
    "qwen3-vl-moe": ("qwen3_vl_moe", 1, "bfloat16", {}, 0.03),
    "gemma3": ("gemma3", 1, "bfloat16", {}, 0.03),
    # In bfloat16 transformers itself is 0.2 off.
    "gemma4": ("gemma4", 1, "float16", {"max_num_batched_tokens": 128}, 0.03),
    "qwen3.5": ("qwen3_5", 1, "float32", MTP, 1e-4),
}


SERVICE: dict[str, Any] = {
    # vLLM takes JPEG files as one frame per second otherwise.
    "media_io_kwargs": {"video": {"fps": multimodal.RATE}},
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
    result = {
        name: multimodal.case(name, kind, directory / name, ranks, dtype, engine)
        for name, (kind, ranks, dtype, engine, _) in CASES.items()
    }
    model, adapter = directory / "service", str(directory / "adapter")
    service = multimodal.case("service", "qwen2_5_vl", model, 2, "float32", SERVICE)
    media_service.adapter(model, Path(adapter))
    short = result["qwen2.5-vl in graphs"] | {"name": "no streams", "streams": 36}
    # Streams for two of the encoder's graphs.
    result["no streams"] = short
    return result | {"service": service | {"task": "service", "adapter": adapter}}


@pytest.fixture(scope="module")
def results(cases: dict[str, Any]) -> dict[str, Any]:
    done = model_types.run(list(cases.values()))
    return npus.by_name(done) | {"log": done.stdout + done.stderr}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    name: str, cases: dict[str, Any], results: dict[str, Any]
) -> None:
    kind, _, dtype, _, bound = CASES[name]
    assert not results[name]["differs"]
    logits = multimodal.reference(kind, Path(cases[name]["model"]), dtype)
    result = multimodal.compare(logits, results[name]["results"])
    print(f"{name}: {result}")
    assert len(results[name]["results"]) == 2 * len(cases[name]["prompts"])
    assert result["mean"] < bound


def test_images_are_encoded_in_graphs(results: dict[str, Any]) -> None:
    """All but the image that is larger than every budget, also where decodes have no graphs."""
    single, parallel = (results[f"{name} in graphs"] for name in ("qwen2.5-vl", "qwen3-vl"))
    assert single["encoded"] == {"graphs": 3, "eagerly": 1}
    assert parallel["encoded"]["graphs"] > 0  # of the first rank
    assert [single["graphs"], parallel["graphs"]] == ["NONE", "FULL_DECODE_ONLY"]
    assert single["counted"] == len(
        IN_GRAPHS["compilation_config"]["encoder_cudagraph_token_budgets"]
    )


def test_an_encoder_without_streams_is_run_eagerly(
    cases: dict[str, Any], results: dict[str, Any]
) -> None:
    result = results["no streams"]
    assert result["encoded"] == {"graphs": 0, "eagerly": 0}
    assert "graphs of the encoder disabled: " in results["log"]
    logits = multimodal.reference("qwen2_5_vl", Path(cases["no streams"]["model"]))
    assert multimodal.compare(logits, result["results"])["mean"] < 1e-4


@pytest.fixture(scope="module")
def service(results: dict[str, Any]) -> dict[str, Any]:
    assert not results["service"]["differs"]
    (result,) = results["service"]["results"]
    return dict(result)


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
    """The answers are those to the same prompts without the chat API, among them a video's."""
    assert len(service["chat"]) == len(multimodal.LENGTHS)
    for answer, expected in zip(service["chat"], service["mixed"], strict=False):
        assert answer["tokens"] == expected["tokens"]
        assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


def test_structured_output_about_images(service: dict[str, Any]) -> None:
    assert len(service["grammar"]) == len(multimodal.LENGTHS)
    assert set(service["grammar"]) <= set(media_service.CHOICES)


@pytest.mark.parametrize("name", media_service.unusual())
def test_unusual_images_are_answered_or_refused(name: str, service: dict[str, Any]) -> None:
    """A refusal ends its request, and the engine serves the next."""
    result = service["unusual"][name]
    assert isinstance(result, str) == (name in media_service.BROKEN), result
    if not isinstance(result, str):
        assert all(math.isfinite(each) for each in result["logprobs"])
    assert service["last"]["tokens"] == service["mixed"][0]["tokens"]


ALONE = {"compilation_config": IN_GRAPHS["compilation_config"] | {"cudagraph_mode": "NONE"}}
LAYOUTS = {
    # With V2 only the first stage has graphs.
    "PP2": ("qwen2.5-vl", {layouts.PP: 2} | ALONE),
    "DP2 EP2": ("qwen3-vl-moe", {layouts.DP: 2} | layouts.EP),
}
ROUNDS = 2
"""Each data-parallel engine gets some of the requests."""


@pytest.fixture(scope="module")
def in_layouts(cases: dict[str, Any]) -> dict[str, Any]:
    given = []
    for name, (of, layout) in LAYOUTS.items():
        case = cases[of] | {"name": name}
        case["engine"] = case["engine"] | layout | {"dtype": "float32"}
        for key in ("prompts", "lengths"):
            case[key] = case[key] * ROUNDS
        del case["ranks"]  # An executor of processes serves it.
        given.append(case)
    command = sys.executable, str(layouts.PROGRAM), json.dumps(given)
    return npus.by_name(npus.run(2, *command, VLLM_PLUGINS="", OMP_NUM_THREADS="1"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_processes(name: str, cases: dict[str, Any], in_layouts: dict[str, Any]) -> None:
    case = cases[LAYOUTS[name][0]]
    answers = [answer for (answer,) in in_layouts[name]["results"]]
    model = multimodal.reference(case["media"], Path(case["model"]))
    comparison = multimodal.compare(model, answers)
    print(f"{name}: {comparison}")
    assert len(answers) == ROUNDS * len(multimodal.LENGTHS)
    assert comparison["others"] == 0
    assert comparison["most"] < 1e-3
