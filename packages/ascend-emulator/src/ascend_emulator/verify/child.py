# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Process that runs cases on one NPU: it reads their names from its input and writes a line of JSON
for each to a pipe.

After a case that failed it computes something known. If that is wrong the NPU's context is lost,
and the process ends; the parent continues with the next case in a new one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ascend_emulator.verify import tables

LOST = 3  # Exit status: the context is lost, see the last record.


def _alive() -> bool:
    """Whether the NPU still computes."""
    import torch

    try:
        x = torch.arange(8, dtype=torch.float32).npu() * 2 + 1
        torch.npu.synchronize()
        return x.cpu().tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]
    except RuntimeError:
        return False


def runner(section: str) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """The function that runs a section's case by name."""
    module = import_module(
        f"ascend_emulator.verify.{'runtime' if section == 'limits' else section}"
    )
    if section == "collectives":
        return module.run
    if section in ("operators", "refusals"):
        return lambda name, options: module.run(tables.cases(section)[name])
    return lambda name, options: module.PROGRAMS[name](options)


def main() -> int:
    """Run the cases that standard input names (JSON: device, file descriptor, options, list of
    [section, name])."""
    task = json.load(sys.stdin)
    pipe = os.fdopen(task["pipe"], "w", buffering=1)
    import torch
    import torch_npu  # noqa: F401

    torch.npu.set_device(task["device"])
    if task["options"].get("eager", True):
        torch.npu.set_compile_mode(jit_compile=False)
        torch.npu.config.allow_internal_format = False
    from ascend_emulator.verify.errors import described

    for section, name in task["cases"]:
        pipe.write(json.dumps({"begin": [section, name]}) + "\n")
        started = time.monotonic()
        try:
            record = runner(section)(name, task["options"])
        except AttributeError as error:  # This torch_npu is older than the name.
            record = {"outcome": "absent", "error": described(error)}
        except Exception as error:
            description = described(error)
            # For example a dtype that the chip lacks.
            refused = section in ("timings", "launches") and description["codes"]
            record = {"outcome": "refused" if refused else "failed", "error": description}
        failed = record.get("outcome") not in ("computed", "accepted", "observed", "absent")
        lost = failed and not _alive()
        if lost:
            record["context"] = "lost"
        seconds = time.monotonic() - started
        end = {"end": [section, name], "record": record, "seconds": seconds}
        pipe.write(json.dumps(end) + "\n")
        if lost:
            pipe.close()
            os._exit(LOST)  # torch_npu's exit may hang or abort without a context.
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # Likewise: later failures do not matter.


if __name__ == "__main__":
    sys.exit(main())
