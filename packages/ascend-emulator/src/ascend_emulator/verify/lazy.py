# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""torch and torch_npu, imported at their first use: the command lists its cases without them."""

from importlib import import_module
from typing import Any


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


torch: Any = _Module("torch")
torch_npu: Any = _Module("torch_npu")
dist: Any = _Module("torch.distributed")
