# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The trained model tools/models/adder: its vocabulary, and texts that have one right
continuation."""

import json
from functools import cache

from harness import checkout


@cache
def vocabulary() -> dict[str, int]:
    """Token ids by character."""
    return dict(json.loads((checkout.ADDER / "tokenizer.json").read_text())["model"]["vocab"])


def chain(first: int, second: int, sums: int) -> str:
    """`sums` sums that start with first+second=, as the model writes them (see its card)."""
    text = ""
    for _ in range(sums):
        text += f"{first}+{second}={first + second};"
        first, second = second, (first + second) % 100
    return text
