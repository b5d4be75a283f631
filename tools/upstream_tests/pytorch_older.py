# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Lets the test files of PyTorch 2.4 run with torch 2.13, for where those of the release cannot be
had (--older)."""

from __future__ import annotations

import re
from typing import Any

import torch.testing._internal.common_cuda as cuda
import torch.testing._internal.common_device_type as device_type
import torch.testing._internal.common_methods_invocations as methods
import torch.testing._internal.common_mkldnn as mkldnn
import torch.testing._internal.common_utils as utils
from torch.utils._dtype_abbrs import dtype_abbrs

# Patterns of text that torch 2.13 does not run, and what its own release of the file says instead.
LOAD = (r"torch\.load\(f\)", "torch.load(f, weights_only=False)")
# not only CUDA since
ACCELERATORS = "test_compare_cpu|test_python_ref_executor|test_fake_crossref_backward_(?:no_)?amp"
CHANGES = {
    "test_foreach.py": [
        (r"(op\.sample_inputs\(\s*\S+,\s*dtype)\b", r"\1, allow_higher_dtype_scalars=True"),
        (
            (
                r"        try:\n(            foreach_op_?)(\(tensors1, tensors2\)\n)        except"
                r" .*\n.*\n *\[ref_?\(.*\n"
            ),
            r"        of_sub = (dtype, foreach_op) == (torch.bool, torch._foreach_sub)\n"
            r"        said = re.escape(_BOOL_SUB_ERR_MSG if of_sub else 'size of tensor a (10)')\n"
            r"        with self.assertRaisesRegex(RuntimeError, said):\n\1\2",
        ),
        (r"(type\(e\), re\.escape\(str\(e\))\)", r"\1.splitlines()[0])"),
    ],
    "test_linalg.py": [(r"super\(self\.__class__, self\)", "super()")],
    "test_modules.py": [
        LOAD,
        (
            r"if torch\.cuda\.is_available\(\):(\s+devices \+= \[)'cuda'\]",
            r"if torch.accelerator.is_available():\1torch.accelerator.current_accelerator().type]",
        ),
    ],
    "nn/test_convolution.py": [LOAD],
    "test_ops.py": [
        (
            rf"    @onlyCUDA\n((?:(?!    @onlyCUDA|    def ).*\n)*    def (?:{ACCELERATORS})\()",
            r"\1",
        )
    ],
}


def adapt(name: str, source: str) -> str:
    """The source of a test file as torch 2.13 runs it; names that have moved since are restored in
    their modules."""
    moved: list[tuple[Any, str, Any]] = [
        (methods, "binary_ufuncs_and_refs", methods.binary_ufuncs),
        (methods, "unary_ufuncs_and_refs", methods.unary_ufuncs),
        (methods, "skip", device_type.skip),
        (methods, "xfail", device_type.xfail),
        (cuda, "tf32_is_not_fp32", lambda: False),
        (cuda, "tf32_on_and_off", _unchanged),
        (mkldnn, "bf32_on_and_off", _unchanged),
        (mkldnn, "reduced_f32_on_and_off", _unchanged),
        (utils, "dtype_abbrs", dtype_abbrs),
    ]
    for module, attribute, value in moved:
        if not hasattr(module, attribute):
            setattr(module, attribute, value)
    # It now takes a set of names, not the test's class and its name.
    skip_ops = device_type.skipOps
    device_type.skipOps = methods.skipOps = lambda *given: (
        skip_ops(*given) if len(given) == 1 else lambda test: test
    )
    for before, after in CHANGES.get(name, []):
        source = re.sub(before, after, source)
    return source


def _unchanged(*_: Any, **__: Any) -> Any:
    return lambda test: test
