# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A copy of the installed vLLM with one name renamed or changed, for what is bound to vLLM's
source."""

import ast
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from ascend_platform import fingerprint

_SPEC = find_spec("vllm")
assert _SPEC  # found, not imported
assert _SPEC.origin
INSTALLED = Path(_SPEC.origin).parent


def make(directory: Path) -> Path:
    """Copy vLLM to a directory for PYTHONPATH; until :func:`write`, the files are links to the
    installed ones."""
    shutil.copytree(
        INSTALLED,
        directory / "vllm",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return directory


def write(directory: Path, file: str, text: str) -> None:
    """Replace a file of the copy, not the installed one that it may be a link to."""
    (directory / file).unlink()
    (directory / file).write_text(text)


def edited(target: str, renamed: bool) -> tuple[str, str]:
    """The file of a target below site-packages, and its text with the target renamed or with
    another body."""
    module, _, qualname = target.partition(":")
    path = INSTALLED.parent.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    if qualname.endswith(".*"):
        prefix = qualname.removesuffix("*")
        text = (
            text.replace(prefix, "torch.accelerator.")
            if renamed
            else f"{text}\n\ndef another():\n    {prefix}another()\n"
        )
        return str(path.relative_to(INSTALLED.parent)), text
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in qualname.split("."):
        nodes = [definition for node in nodes for definition in fingerprint._named(node, name)]
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
            changed = re.sub(
                rf"^( +){name},$", rf"\1{name}_renamed as {name},", text, flags=re.MULTILINE
            )
            if changed != text:
                write(directory, str(path.relative_to(INSTALLED.parent)), changed)


NO_PRIORITIES = """import dataclasses


@dataclasses.dataclass
class NoPriorities:
    pass


NO_PRIORITIES = NoPriorities()


"""
"""Read by EngineArgs.create_engine_config: a patch wraps that method and is applied to its known
source only, so that the copy leaves it as it is."""

IR_USERS = {
    "kernels/__init__.py": [(r"\nfrom \. import [^\n]*", ""), (r"\n__all__ = [^\n]*", "")],
    "kernels/triton/__init__.py": [(r"\nfrom \. import [^\n]*", ""), (r"\n__all__ = [^\n]*", "")],
    "config/kernel.py": [
        (r"@config\nclass IrOpPriorityConfig:\n.*?\n(?=\S)(?!    )", NO_PRIORITIES),
        (
            r'\n    ir_op_priority: IrOpPriorityConfig[^\n]*\n    """.*?"""\n',
            "\n    ir_op_priority = NO_PRIORITIES\n",
        ),
        (r'\n        factors\["ir_op_priority"\][^\n]*', ""),
        (r"\n        platform_op_priority = .*", "\n"),
    ],
    "config/vllm.py": [
        (r"\n        or cfg\.kernel_config\.ir_op_priority[^\n]*", ""),
        (r"cfg\.kernel_config\.ir_op_priority\.fused_add_rms_norm\[0\]", "None"),
    ],
    "engine/arg_utils.py": [
        (r"\n    IrOpPriorityConfig,", "\n    NO_PRIORITIES,"),
        (r"\n    ir_op_priority: IrOpPriorityConfig[^\n]*", "\n    ir_op_priority = NO_PRIORITIES"),
        (r"\n        if isinstance\(self\.ir_op_priority, dict\):\n[^\n]*", ""),
        (r'\n        kernel_group\.add_argument\("--ir-op-priority"[^\n]*', ""),
    ],
    "v1/worker/worker_base.py": [
        (r"\nimport vllm\.ir", ""),
        (r"\n        vllm_config\.kernel_config\.ir_op_priority\.set_default\(\)", ""),
        (r"\n        vllm\.ir\.set_default_torch_wrap\(.*?\n        \)", ""),
    ],
    "platforms/interface.py": [
        (r"\n    from vllm\.config\.kernel import IrOpPriorityConfig", ""),
        (r"\n    @classmethod\n    def import_ir_kernels\(.*?(?=\n    @classmethod)", ""),
        (r"\n    @classmethod\n    def get_default_ir_op_priority\(.*?(?=\n    @classmethod)", ""),
    ],
    "compilation/backends.py": [
        (r"\nfrom \.passes\.ir\.[^\n]*", ""),
        (r"\n        self\.inductor_config\[pre_grad_pass_key\] = VllmIR.*?\n        \)", ""),
    ],
    "compilation/passes/pass_manager.py": [
        (r"\nfrom \.ir\.[^\n]*", ""),
        (r"\n        self\.(ir_lowering|clone_elimination)\(graph\)", ""),
        (r"\n            self\.(ir_lowering|clone_elimination) = [^\n]*", ""),
        (r"\n        passes\.append\(self\.(ir_lowering|clone_elimination)\.uuid\(\)\)", ""),
    ],
    "model_executor/layers/layernorm.py": [
        (r"from vllm import envs, ir\n", "from vllm import envs\n"),
        (r'ir\.ops\.(\w+)(\.maybe_inplace|\.impls\["native"\]\.impl_fn)?\(', r"\1("),
    ],
    "model_executor/layers/activation.py": [(r"from vllm import ir\n", ""), (r"ir\.ops\.", "")],
    "model_executor/layers/mhc.py": [
        (
            r"    from vllm import ir\n",
            "    from vllm.model_executor.layers.layernorm import rms_norm\n",
        ),
        (r"ir\.ops\.", ""),
    ],
}
"""Edits of the files of vLLM that import its IR on NPUs: what they import or configure goes."""

NOT_ON_NPUS = "kernels/", "compilation/passes/fusion/"
"""Other files that import it."""


def without_ir(directory: Path) -> None:
    """Delete vLLM's IR from a copy, as vLLM 0.34 announces: the package, its configuration, option
    and hooks of platforms.

    The PyTorch forms of its operators become functions of the modules of vLLM's layers that call
    them. A copy without it, such as one of a copy, stays as it is.
    """
    root = directory / "vllm"
    if not (root / "ir").exists():
        return
    for file, edits in IR_USERS.items():
        text = (root / file).read_text()
        for pattern, replacement in edits:
            text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
            assert count, f"{file} has no {pattern}"
        operators = INSTALLED / "ir" / "ops" / Path(file).name
        if operators.exists() and file.startswith("model_executor"):
            tree = ast.parse(operators.read_text())
            called = [
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and f"{node.name}(" in text
            ]
            for node in called:
                node.decorator_list.clear()
            text += (
                "\n\nfrom torch import Tensor\n\n" + "\n\n".join(map(ast.unparse, called)) + "\n"
            )
        write(directory, f"vllm/{file}", text)
    shutil.rmtree(root / "ir")
    shutil.rmtree(root / "compilation" / "passes" / "ir")
    imports = re.compile(
        r"^ *(import vllm\.ir|from vllm\.ir|from vllm import .*\bir\b|from .*\.ir\.)", re.M
    )
    users = [
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if imports.search(file.read_text())
    ]
    left = [file for file in users if not file.startswith(NOT_ON_NPUS)]
    assert not left, f"{left} import vllm.ir"


if __name__ == "__main__":  # Makes a copy for `tools/compat --vllm DIRECTORY`.
    without_ir(make(Path(sys.argv[1])))
