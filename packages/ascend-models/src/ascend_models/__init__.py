# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models that vLLM serves by code for named devices, in forms for Ascend NPUs."""

from ascend_platform import extension

MODELS = {
    "DeepseekV4ForCausalLM": "deepseek_v4.model:DeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel": "deepseek_v4.mtp:DeepSeekV4MTP",
    "InklingForCausalLM": "inkling.model:InklingForCausalLM",
    "InklingForConditionalGeneration": "inkling.model:InklingForConditionalGeneration",
    "Glm5NextForCausalLM": "glm5_next.model:Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration": "glm5_next.model:Glm5NextForConditionalGeneration",
    "KimiLinearForCausalLM": "kimi_linear.model:KimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM": "minimax_m3.model:MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration": (
        "minimax_m3.model:MiniMaxM3SparseForConditionalGeneration"
    ),
}
"""Modules and classes of the architectures."""

OVERRIDES = {
    "deepseek_v4": ("common.routing", "deepseek_v4.attention"),
    "glm5_next": ("common.states", "glm5_next.attention", "glm5_next.kda"),
    "inkling": ("inkling.attention", "inkling.kernels", "inkling.short_conv"),
    "kimi_linear": ("common.kda", "common.states"),
    "minimax_m3": ("minimax_m3.attention",),
}
"""Modules of the overrides of vLLM that a family needs, by its folder."""


def register() -> None:
    """Offer the models to ascend-platform; never raises.

    Entry point of the group ``vllm.general_plugins``. vLLM calls it in every process, possibly more
    than once.
    """
    extension.join("ascend-models", "ascend_models", _offer, api="1.8")


def _offer() -> None:
    refusals = {family: _refusal(family) for family in OVERRIDES}
    for name, path in MODELS.items():
        family = path.partition(".")[0]
        if refusals[family]:
            extension.offer(f"model_refusal.{name}", f"{name}: {refusals[family]}")
            continue
        extension.offer(f"model.{name}", f"ascend_models.{path}")
        if ".model:" in path:
            extension.offer(f"model_check.{name}", f"ascend_models.{family}.limits.check")


def _refusal(family: str) -> str:
    """Why the installed vLLM does not fit a family, in one line; "" if it does."""
    try:
        extension.check_overrides("ascend_models", *OVERRIDES[family])
    except extension.RefusedError as error:
        return str(error)
    return ""


def install_overrides(family: str) -> None:
    """Replace what a family needs of vLLM in this process, before its model is made; a second call
    does nothing.

    Raises:
        RefusedError: a target is missing or has changed.
    """
    extension.install_overrides("ascend_models", *OVERRIDES[family])
