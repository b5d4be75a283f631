# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Signatures of a public interface, for comparison with a record."""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any


def signature(value: Any) -> str:
    """Without the addresses of functions that are defaults."""
    return re.sub(" at 0x[0-9a-f]+", "", str(inspect.signature(value)))


def signatures(name: str, value: Any) -> Iterator[str]:
    """A line for a name, for each public member of a class, and for each name of a module."""
    if inspect.ismodule(value):
        for each in sorted(value.__all__):
            yield from signatures(f"{name}.{each}", getattr(value, each))
        return
    # The signature is Python's, and differs between versions.
    of_enum = inspect.isclass(value) and issubclass(value, Enum)
    yield f"{name}{signature(value)}" if callable(value) and not of_enum else name
    for each in sorted(vars(value)) if inspect.isclass(value) else ():
        if not each.startswith("_"):
            member = getattr(value, each)
            yield f"{name}.{each}{signature(member) if callable(member) else ''}"
