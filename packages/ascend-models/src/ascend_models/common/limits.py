# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parts of the checks of configurations, for all families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ascend_platform import extension

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRAPHS = ("NONE", "FULL_DECODE_ONLY")
"""Graph modes of families whose decodes are captured."""


def takes_media(vllm_config: VllmConfig, *modalities: str) -> bool:
    """Whether a prompt may have an input of one of the modalities, such as ``image``."""
    media = vllm_config.model_config.multimodal_config
    return media is not None and any(media.get_limit_per_prompt(each) for each in modalities)


def refuse(family: str, asked: Mapping[str, object]) -> None:
    """Refuse options that a family does not support.

    Args:
        family: its published name.
        asked: the options by their description, true for those that are set.

    Raises:
        RefusedError: all that are set, in one line.
    """
    if refused := [name for name, is_set in asked.items() if is_set]:
        raise extension.RefusedError(
            f"{family} in ascend-models {extension.version('ascend-models')} does not support"
            f" {', '.join(refused)} yet; fix: leave it out"
        )
