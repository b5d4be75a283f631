# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The public interface of the library: what its modules define without an underscore."""

import importlib
from pathlib import Path
from pkgutil import iter_modules

import ascend_transfer
from harness.project.signatures import signatures


def test_interface_is_the_recorded_one() -> None:
    """Record a change of it for the version of the wheel that has the change."""
    names = sorted(each.name for each in iter_modules(ascend_transfer.__path__, "ascend_transfer."))
    lines: list[str] = []
    for module in map(importlib.import_module, names):
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                lines += signatures(f"{module.__name__.rpartition('.')[2]}.{name}", value)
    record = Path(__file__).parent / "transfer_0.1.txt"
    assert "\n".join(lines) == record.read_text().rstrip()
