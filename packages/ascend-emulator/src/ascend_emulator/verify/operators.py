# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cases of operators: results on the NPU against float64 on the CPU."""

from __future__ import annotations

import re
from typing import Any

from ascend_emulator.verify import inputs, references
from ascend_emulator.verify.errors import described
from ascend_emulator.verify.lazy import torch
from ascend_emulator.verify.tables import Case

ULPS = {"torch.float32": 16.0, "torch.float16": 4.0, "torch.bfloat16": 4.0}
"""Tolerances of cases without their own. Some 1e-6, 4e-3 and 3e-2, of the order that CANN's
operators promise."""
SHOWN = 16


def namespace() -> dict[str, Any]:
    """The names that calls may use besides their inputs."""
    import torch
    import torch_npu

    return {
        "torch": torch,
        "torch_npu": torch_npu,
        "npu": torch_npu,
        "F": torch.nn.functional,
        "ref": references,
    }


def arguments(case: Case) -> dict[str, Any]:
    """A case's inputs on the CPU."""
    return {
        name: inputs.make(text, inputs.seed_of(f"{case.name}.{name}"))
        for name, text in case.inputs.items()
    }


def _leaves(value: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if leaf is not None]


def _evaluate(case: Case, expression: str, tensors: dict[str, Any]) -> list[Any]:
    """Results of an expression: tensors and numbers; with ``gradients`` those of the floating
    inputs too."""
    names = namespace() | tensors
    if not case.gradients:
        with torch.no_grad():
            return _leaves(eval(expression, names))
    leaves = {
        name: value.detach().requires_grad_() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    wanted = [value for value in leaves.values() if value.requires_grad]
    outputs = _leaves(eval(expression, names | leaves))
    smooth = [output for output in outputs if output.requires_grad]
    slopes = [
        ((torch.arange(each.numel()) % 7 - 3) / 4).view(each.shape).to(each.device, each.dtype)
        for each in smooth
    ]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(smooth, wanted, slopes)]


def _wide(tensor: Any) -> Any:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _compare(actual: Any, wanted: Any, ulps: float) -> dict[str, Any]:
    """Dtype, shape, hash and errors of one result."""
    if not isinstance(actual, torch.Tensor):
        return {"number": actual, "within": actual == wanted}
    result: dict[str, Any] = {
        "dtype": str(actual.dtype).removeprefix("torch."),
        "shape": list(actual.shape),
        "hash": inputs.digest(actual),
    }
    if wanted is None:
        return result
    if not isinstance(wanted, torch.Tensor) or wanted.shape != actual.shape:
        return result | {"within": False, "why": "the reference has another shape"}
    if not (actual.is_floating_point() or actual.is_complex()):
        wanted = wanted.to(actual.dtype)
        different = int((actual != wanted).sum())
        furthest = int((actual.long() - wanted.long()).abs().max()) if different else 0
        # a quantized value between two neighbours
        near = not different or (furthest == 1 and actual.dtype == torch.int8)
        return result | {"different": different, "most": furthest, "within": near}
    wanted = _wide(wanted.to(actual.dtype)) if actual.element_size() > 1 else _wide(wanted)
    ours = torch.view_as_real(_wide(actual)) if actual.is_complex() else _wide(actual)
    reference = torch.view_as_real(wanted) if wanted.is_complex() else wanted
    finite = ours.isfinite() & reference.isfinite()
    odd = ~finite & ~((ours == reference) | (ours.isnan() & reference.isnan()))
    error = (ours - reference).abs()[finite]
    size = reference.abs()[finite]
    eps = torch.finfo(actual.dtype).eps
    most = float((error / (eps * (1 + size))).max()) if error.numel() else 0.0
    square = float(size.square().sum())
    result |= {
        "ulps": rounded(most),
        "max_abs": rounded(float(error.max()) if error.numel() else 0.0),
        "rel": rounded(float((error.square().sum() / square) ** 0.5) if square else 0.0),
    }
    if int(odd.sum()):
        result["special"] = int(odd.sum())  # Infinities and NaN that only one of the two has.
    return result | {"within": most <= ulps and not int(odd.sum())}


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def run(case: Case) -> dict[str, Any]:
    """Run a case on the current NPU and describe what came of it."""
    tensors = arguments(case)
    record: dict[str, Any] = {}
    if tensors:
        record["inputs"] = inputs.digest(torch.cat([_bytes(each) for each in tensors.values()]))[:8]
    try:
        if case.before:
            exec(case.before, namespace())
        outputs = _evaluate(case, case.call, {name: value.npu() for name, value in tensors.items()})
        # Errors of asynchronous execution are raised here, before results are read.
        torch.npu.synchronize()
        actual = [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
    except (
        AttributeError,
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
    ) as error:
        is_absent = isinstance(error, AttributeError) and re.search("npu|module", str(error))
        outcome = "absent" if is_absent else "refused"
        return record | {"outcome": outcome, "error": described(error)}
    undefined = case.reference == "none"
    wide = {name: _wide(value) for name, value in tensors.items()}
    wanted = (
        [None] * len(actual) if undefined else _evaluate(case, case.reference or case.call, wide)
    )
    if len(actual) != len(wanted):
        why = f"{len(actual)} results, {len(wanted)} expected"
        return record | {"outcome": "computed", "within": False, "why": why}
    bounds = [case.ulps or ULPS.get(str(getattr(each, "dtype", "")), 16.0) for each in actual]
    record["outputs"] = [_compare(*each) for each in zip(actual, wanted, bounds, strict=True)]
    if case.values:
        shown = [
            each.flatten()[:SHOWN].tolist() if isinstance(each, torch.Tensor) else [each]
            for each in actual
        ]
        record["values"] = [[str(value) for value in each] for each in shown]
    record["outcome"] = "computed"
    if not undefined:
        record["within"] = all(each["within"] for each in record["outputs"])
    return record


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8)
