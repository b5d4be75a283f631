# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm serve --headless`` exits with status 0 when its workers or engines have died."""

from collections.abc import Callable
from typing import Any


def run_headless(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(args: Any) -> None:
        original(args)  # raises SystemExit on a signal
        raise SystemExit(
            "vllm serve --headless: a worker or engine of this machine has died; the first error"
            " above says why"
        )

    return replacement
