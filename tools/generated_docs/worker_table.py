# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The worker methods that vLLM calls, and where each is implemented: the table of docs/platform.md,
for tools/docs-tables."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

REFUSED = {
    "checkpoint_prepare": "a process with an open NPU cannot be checkpointed; the call raises this",
    "checkpoint_restore": "as `checkpoint_prepare`",
    "elastic_ep_execute": "`--enable-elastic-ep` is refused before anything is loaded",
    "reinitialize_distributed": "as `elastic_ep_execute`",
    "handle_ft_command": "`--enable-fault-tolerance` is refused before anything is loaded",
}
NOT_METHODS = {"step", "mm_receiver_cache"}


def called(package: Path) -> set[str]:
    """Names that vLLM's code passes to ``collective_rpc`` and similar methods as strings."""
    names = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "collective_rpc" not in text:
            continue
        for call in (
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args
        ):
            function = call.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            first = call.args[0]
            if (
                name.startswith("collective_rpc")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                names.add(first.value)
    return names


def rows() -> list[list[str]]:
    """Each method with the class that implements it.

    Raises:
        SystemExit: a method without an implementation or reason, or a reason for one that vLLM does
            not have.
    """
    import vllm
    from ascend_platform.worker.worker import NPUWorker
    from vllm.v1.executor.ray_utils import RayWorkerWrapper
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    asked = called(Path(vllm.__file__).parent)
    declared = {
        name
        for name in vars(WorkerBase)
        if not name.startswith("_") and inspect.isfunction(vars(WorkerBase)[name])
    }
    public = {
        name
        for name in vars(Worker)
        if not name.startswith("_") and inspect.isfunction(vars(Worker)[name])
    }
    names = (asked | declared | public) - NOT_METHODS
    if unknown := REFUSED.keys() - names:
        raise SystemExit(f"worker_table: vLLM has no worker's method {', '.join(sorted(unknown))}")
    found = []
    for name in sorted(names):
        owner = next(
            (
                each
                for each in (*NPUWorker.__mro__, *RayWorkerWrapper.__mro__)
                if name in vars(each)
            ),
            None,
        )
        if owner is None and name not in REFUSED:
            raise SystemExit(f"worker_table: vLLM calls {name} on a worker, and no class has it")
        whose = "refused" if name in REFUSED else "ours" if owner is NPUWorker else "vLLM's"
        where = REFUSED.get(name) or ("" if owner in (None, NPUWorker) else f"`{owner.__name__}`")
        found.append([f"`{name}`", whose, where, "yes" if name in asked else ""])
    return found


if __name__ == "__main__":
    from ascend_emulator import activate

    activate()
    print(json.dumps(rows()))
