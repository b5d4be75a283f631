"""A copy of the installed vLLM with one name renamed or changed, for what is bound to vLLM's source."""

import ast
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from ascend_platform import fingerprint

_SPEC = find_spec("vllm")
assert _SPEC  # found, not imported
assert _SPEC.origin
INSTALLED = Path(_SPEC.origin).parent


def make(directory: Path) -> Path:
    """Copy vLLM to a directory for PYTHONPATH; until :func:`write`, the files are links to the installed ones."""
    shutil.copytree(INSTALLED, directory / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def write(directory: Path, file: str, text: str) -> None:
    """Replace a file of the copy, not the installed one that it may be a link to."""
    (directory / file).unlink()
    (directory / file).write_text(text)


def edited(target: str, renamed: bool) -> tuple[str, str]:
    """The file of a target below site-packages, and its text with the target renamed or with another body."""
    module, _, qualname = target.partition(":")
    path = INSTALLED.parent.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    if qualname.endswith(".*"):
        prefix = qualname.removesuffix("*")
        text = text.replace(prefix, "torch.accelerator.") if renamed else f"{text}\n\ndef another():\n    {prefix}another()\n"
        return str(path.relative_to(INSTALLED.parent)), text
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in qualname.split("."):
        nodes = [found for node in nodes for found in fingerprint._named(node, name)]
    lines = text.splitlines(keepends=True)
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        if not renamed and hasattr(node, "body"):
            last = node.body[-1]
            lines.insert(last.lineno - 1, f"{' ' * last.col_offset}changed = True\n")
            continue
        before, after = (name, f"{name}_renamed") if renamed else ("= ", "= None or ")
        assert before in lines[node.lineno - 1]
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(before, after, 1)
    return str(path.relative_to(INSTALLED.parent)), "".join(lines)


def rename_in_importers(directory: Path, target: str) -> None:
    """Let the copy's modules import a renamed function by its new name, as vLLM's own would."""
    module, _, name = target.partition(":")
    for path in INSTALLED.rglob("*.py"):
        text = path.read_text()
        if f"from {module} import" in text:
            changed = re.sub(rf"^( +){name},$", rf"\1{name}_renamed as {name},", text, flags=re.MULTILINE)
            if changed != text:
                write(directory, str(path.relative_to(INSTALLED.parent)), changed)
