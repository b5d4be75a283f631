# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tables of text, aligned for a terminal or as Markdown."""

from __future__ import annotations

Rows = list[list[str]]


def aligned(head: list[str], rows: Rows, names: int = 1) -> list[str]:
    """Lines of a table whose first ``names`` columns are names, the others numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]


def markdown(head: list[str], rows: Rows) -> list[str]:
    """Lines of a table in Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *cells]]
