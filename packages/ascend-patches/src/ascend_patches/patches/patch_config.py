# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Experts without a gate (Nemotron-H) are refused by the name of the platform."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.__post_init__",
    scope="worker",
    vllm=">=0.31,<0.34",
    reason=(
        "Nemotron-H's experts, which have no gate, are refused: `is_act_and_mul=False is supported"
        " only for CUDA, XPU`"
    ),
    upstream="no issue is known; the check names platforms, and is the last line of the method",
    remove_when="the check is by what the platform's experts support",
    fingerprint=["2b3caedc3c84", "6d4e5859c5f3"],
)
def post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any) -> None:
        try:
            original(self)
        except NotImplementedError as error:
            if "is_act_and_mul" not in str(error):
                raise

    return replacement
