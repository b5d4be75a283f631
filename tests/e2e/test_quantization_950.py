# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized models on an emulated Ascend 950, which multiplies FP8, MXFP8 and MXFP4 as they are,
compared with transformers with dequantized weights.

The layers of a model have different schemes. `tools/check floats` serves every form of checkpoint.
"""

from typing import Any

import pytest
from harness import every_case
from harness.compare import floats, layouts, quantized
from harness.models import gpt_oss
from harness.references import dequantized

pytestmark = pytest.mark.usefixtures("one_thread")

GPT_OSS = "gpt-oss, MXFP4"
LEFT_OUT = {"int8", "modelopt", "ascend, bfloat16"}
"""Served by the operators of other chips, read by the classes that serve ``online`` and ``ascend``,
or without quantized inputs."""
FORMS = [
    form for form in ["int8", *floats.SCHEMES] if every_case.is_wanted() or form not in LEFT_OUT
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dequantized.Model]:
    directory = tmp_path_factory.mktemp("models")
    return {form: floats.make(form, directory) for form in FORMS}


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """gpt-oss with experts in MXFP4, and expanded."""
    return gpt_oss.make(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def results(models: dict[str, dequantized.Model], mxfp4: tuple[Any, Any]) -> dict[str, Any]:
    cases = [floats.case(form, model) for form, model in models.items()]
    cases.append(layouts.case(GPT_OSS, mxfp4[0], floats.EAGER, dtype="bfloat16"))
    return floats.serve(cases)


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_dequantized_weights(
    form: str, results: dict[str, Any], models: dict[str, dequantized.Model]
) -> None:
    served = results[form]["results"]
    alike = dequantized.Reference(models[form], quantized=True)
    count, max_diff, mean = alike.compare(served)
    exact = dequantized.Reference(models[form], quantized=False).compare(served)
    wrong = floats.broken(alike, served)
    print(f"{form}: {count} tokens, {mean:.4f}, at most {max_diff:.4f}; {exact}; broken {wrong}")
    assert count == 33
    bound = quantized.BOUND if form == "int8" else floats.BOUND
    assert mean < bound < min(wrong.values())


def test_experts_of_gpt_oss_stay_in_eight_bits(
    results: dict[str, Any], mxfp4: tuple[Any, Any]
) -> None:
    import torch

    served = results[GPT_OSS]["results"]
    assert "MXExperts" in results[GPT_OSS]["kinds"]
    count, mismatches, max_diff, mean = layouts.compare(mxfp4[1], "bfloat16", served)
    distance = f"average {mean:.4f} at most {max_diff:.4f}"
    print(f"{GPT_OSS}: {count} tokens, {mismatches} others, {distance}")
    assert count == 33
    model = layouts.reference(mxfp4[1], "bfloat16")
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data *= 1.25

    def logprobs(tokens: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    wrong = layouts.distances(logprobs, model.config.vocab_size, served)[3]
    print(f"with wrong scales {wrong:.4f}")
    assert mean < floats.BOUND < wrong
