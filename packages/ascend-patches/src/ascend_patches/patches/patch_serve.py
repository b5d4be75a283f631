# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm serve --headless`` exits with status 0 when its workers or engines have died."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.entrypoints.cli.serve:run_headless",
    scope="platform",
    vllm=">=0.31,<0.34",
    reason="`vllm serve --headless` exits with status 0 when its workers or engines die",
    upstream="https://github.com/vllm-project/vllm/issues/48966",
    remove_when="the lowest supported vLLM exits with another status",
    fingerprint=["d39696ca1a92", "cfb4ed7dc5f9"],
)
def run_headless(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(args: Any) -> None:
        original(args)  # raises SystemExit on a signal
        raise SystemExit(
            "vllm serve --headless: a worker or engine of this machine has died; the first error"
            " above says why"
        )

    return replacement
