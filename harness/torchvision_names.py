# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of torchvision, of which there is no build for the CPU build of torch:
`torchvision_names.stand_in()`.

The text models of some families are in files of vLLM that import its image functions, and use none
of them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = (
    "",
    ".io",
    ".transforms",
    ".transforms.functional",
    ".transforms.v2",
    ".transforms.v2.functional",
)


def stand_in() -> None:
    """Let torchvision be imported in this process; a name of it is an empty class. Nothing where it
    is installed."""
    if importlib.util.find_spec("torchvision"):
        return
    for name in (f"torchvision{each}" for each in MODULES):
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__getattr__ = lambda attribute: type(attribute, (), {})  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
