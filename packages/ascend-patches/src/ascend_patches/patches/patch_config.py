# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Experts without a gate (Nemotron-H) are refused by the name of the platform."""

from collections.abc import Callable
from typing import Any


def post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any) -> None:
        try:
            original(self)
        except NotImplementedError as error:
            if "is_act_and_mul" not in str(error):
                raise

    return replacement
