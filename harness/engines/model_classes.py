# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models' classes of vLLM, imported in this process: `model_classes.load(["LlamaForCausalLM"])`."""

from collections.abc import Iterable
from typing import Any

from vllm import ModelRegistry


def load(architectures: Iterable[str]) -> None:
    """Import models' classes here. vLLM would start a process for each, to ask the class what the
    model needs."""
    for architecture in architectures:
        registered: Any = ModelRegistry.models.get(architecture)
        if hasattr(registered, "load_model_cls"):
            ModelRegistry.register_model(architecture, registered.load_model_cls())
