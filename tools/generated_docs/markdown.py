# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may have ``two backticks`` as in docstrings."""
    lines = [
        " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in row) for row in rows
    ]
    return "\n".join(
        f"| {line} |" for line in (" | ".join(head), " | ".join(["---"] * len(head)), *lines)
    )
