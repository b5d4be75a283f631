# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantization schemes by their names in ``quant_model_description.json``."""

from ascend_quantization.base import Scheme
from ascend_quantization.schemes.floats import (
    W4A4MXFP4,
    W4A8MXFP,
    W4A16MXFP4,
    W8A8MXFP8,
    W8A8FP8Block,
    W8A8FP8Dynamic,
)
from ascend_quantization.schemes.w4a8 import W4A8Dynamic
from ascend_quantization.schemes.w8a8 import W8A8, W8A8Dynamic
from ascend_quantization.schemes.weight_only import W4A16, W8A16

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        W8A8(),
        W8A8Dynamic(),
        W8A16(),
        W4A16(),
        W4A8Dynamic(),
        W8A8FP8Dynamic(),
        W8A8MXFP8(),
        W4A8MXFP(),
        W4A4MXFP4(),
        W4A16MXFP4(),
    )
}
FP8_BLOCK = W8A8FP8Block()
"""Has no name of ModelSlim."""
FLOAT = "FLOAT"
"""Scheme name of a weight that is not quantized."""
