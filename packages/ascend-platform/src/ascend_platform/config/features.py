# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A feature of vLLM that is not supported: its name, and who uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Feature(NamedTuple):
    """A feature that is not supported.

    ``asked`` returns whether a configuration requests the feature: a string is the value to show,
    any other value counts as a boolean. With ``of_model`` it is called only for a configuration
    with a model.
    """

    name: str
    asked: Callable[[VllmConfig], Any]
    of_model: bool = False
