# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check WHAT …`: the `main()` of the module WHAT of `compare/`, with
emulated NPUs."""

import importlib
import sys

from ascend_emulator.activation import activate

if __name__ == "__main__":  # Not in the processes that a check starts.
    activate()  # Before the import, because torch loads torch_npu, which needs CANN's libraries.
    what = sys.argv.pop(1)
    importlib.import_module(f"harness.compare.{what}").main()
