# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models in FP8, MXFP8 and MXFP4 on an emulated Ascend 950, compared with transformers: `tools/check
floats` and e2e/test_quantization_950.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import checkout, every_case
from harness.compare import layouts, quantized
from harness.engines import npus
from harness.models import floats, quantize
from harness.references import dequantized

CHIP = "Ascend950PR_9599"
PROGRAM = checkout.PROGRAMS / "serve_layout.py"
BOUND = 0.1
"""Of the average distance of log-probabilities from transformers' with dequantized weights and
inputs that are quantized alike. Float16 moves some inputs across a step of e4m3, which is an eighth
of a value, so that the distance is more than that of int8 inputs."""

EAGER = layouts.OF_EXPERTS["TP1"] | {"enforce_eager": True}
MXFP8 = "W8A8_MXFP8"
# Each layer of a model has the next scheme. The first layer is dense, and the others have experts.
SCHEMES = {
    "fp8": ["FP8 block"] * 2,
    "ascend": [MXFP8, "W8A8FP8_DYNAMIC", MXFP8, "W4A8_MXFP", "W4A4_MXFP4"],
    "ascend, bfloat16": ["W4A16_MXFP4"] * 2,
    "compressed-tensors": ["W8A8FP8_DYNAMIC", "FP8 tensor", MXFP8, "W4A8_MXFP", "W4A4_MXFP4"],
    "modelopt": [MXFP8] * 2,
    "online": [MXFP8] * 2,
}
OPTIONS = {"online": {"quantization": "mxfp8"}}


def make(form: str, directory: Path) -> dequantized.Model:
    """The model in this form of checkpoint, or ``int8``, of the schemes that the chip shares with
    others."""
    if form == "int8":
        specs = quantized.STATIC, quantized.DYNAMIC, quantize.Spec(4, group=64, symmetric=False)
        return quantized.make("dense", "ascend", "float16", directory, specs=specs)
    written, _, dtype = form.partition(", ")
    return floats.make(directory, written, SCHEMES[form], dtype or "float16")


def case(form: str, model: dequantized.Model) -> dict[str, Any]:
    return quantized.case(form, model, EAGER | OPTIONS.get(form, {}))


def serve(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The engines' answers, by the names of the cases."""
    command = (sys.executable, str(PROGRAM), json.dumps(cases))
    done = npus.run(1, *command, ASCEND_EMULATOR_SOC=CHIP, VLLM_PLUGINS="", OMP_NUM_THREADS="1")
    return npus.by_name(done)


def broken(reference: dequantized.Reference, served: Any) -> dict[str, float]:
    """Average distances when the scales of one scheme's matrices are a quarter too large, of int8 a
    tenth."""
    distances, matrices = {}, reference.of.written.matrices
    for spec in dict.fromkeys(matrix.spec for matrix in matrices.values()):
        of_spec = {name: matrix for name, matrix in matrices.items() if matrix.spec == spec}
        for name, matrix in of_spec.items():
            is_integer = isinstance(matrix, quantize.Matrix)
            reference.put(name, dequantized.wrong_scale(matrix) if is_integer else matrix.wrong())
        distances[str(spec)] = reference.compare(served)[2]
        for name, matrix in of_spec.items():
            reference.put(name, matrix)
    return distances


def main() -> None:
    """See tools/check floats."""
    every_case.run("tests/e2e/test_quantization_950.py")
