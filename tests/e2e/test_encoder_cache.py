# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Encoder outputs of another instance, by vLLM's connector of files (``ECExampleConnector``)."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare import model_types
from harness.engines import npus, vllm_runner
from harness.references import multimodal
from safetensors.torch import load_file, save_file

KIND = "qwen2_5_vl"


def connector(role: str, directory: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(directory)}
    given = {"ec_connector": "ECExampleConnector", "ec_role": role}
    return {"ec_transfer_config": given | {"ec_connector_extra_config": extra}}


@pytest.mark.skipif(not vllm_runner.IS_V2, reason="served with the V2 model runner")
def test_instance_reads_what_another_has_encoded(tmp_path: Path) -> None:
    """The second has no weights of the encoder, whose outputs it does not compute."""
    model, files = tmp_path / "model", tmp_path / "files"
    cases = {
        role: multimodal.case(role, KIND, model, 1, "float32", connector(role, files))
        for role in ("ec_both", "ec_consumer")
    }
    logits = multimodal.reference(KIND, model, "float32")
    for role, case in cases.items():
        result = npus.by_name(model_types.run([case]))[role]
        comparison = multimodal.compare(logits, result["results"])
        print(f"{role}: {comparison}")
        assert len(result["results"]) == 2 * len(case["prompts"])
        assert comparison["mean"] < 1e-4
        if role == "ec_both":
            assert len(list(files.rglob("*.safetensors"))) == 4  # three images and a video
            weights = load_file(model / "model.safetensors")
            for name, weight in weights.items():
                if "visual" in name:
                    weight.zero_()
            save_file(weights, model / "model.safetensors", {"format": "pt"})
