# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The commands of tools/, for tools/help and for docs/development.md."""

import ast
from pathlib import Path

from generated_docs.markdown import table

TOOLS = Path(__file__).resolve().parents[1]


def commands() -> dict[str, str]:
    """Each command's purpose: the first sentence of its docstring."""
    files = [path for path in sorted(TOOLS.iterdir()) if path.is_file() and not path.suffix]
    texts = {path.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in texts.items()}


def page() -> str:
    rows = [[f"`tools/{name}`", purpose] for name, purpose in commands().items()]
    return table(["command", "what it does"], rows)


def checks() -> str:
    """Comparisons of each argument of tools/check."""
    tree = ast.parse((TOOLS / "check").read_text())
    found: dict[str, str] = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS"
    )
    return table(
        ["`tools/check`", "what it compares"], [[f"`{name}`", x] for name, x in found.items()]
    )
