# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators of Ascend950, which compute in formats of eight and four bits: their tests run in a
process on that chip, because a process sees one chip. Other chips refuse them."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch_npu
from ascend_emulator import chips

HERE, CHIP = Path(__file__).parent, "Ascend950PR_9599"
sys.path.insert(0, str(HERE))
formats, hccl_ranks, mc2_layer = map(
    importlib.import_module, ("narrow_formats", "hccl_ranks", "mc2_layer")
)


@pytest.mark.parametrize(
    ("names", "least"),
    [("attention", 14), ("quantization", 30), ("matmuls", 30), ("fused connections", 30)],
)
def test_on_ascend950(run, names, least):
    # Without conftest.py: calls are noted for this session.
    pytest_of = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    files = [str(HERE / f"{name}_of_950.py") for name in names.split()]
    command = [*pytest_of, "--soc", CHIP, *files]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = run("run", "--soc", CHIP, "--", *command, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > least


def test_dispatch_with_shared_exponents(run):
    done = run(
        "run", "--npus", "2", "--soc", CHIP, "--", sys.executable, HERE / "dispatch_of_950.py"
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    xs = [hccl_ranks.data(rank, (5, 1056), torch.bfloat16) for rank in range(2)]
    ids = [mc2_layer.routing(rank, 5, 2, 4) for rank in range(2)]
    for rank, answer in enumerate(answers):
        expected = torch.cat(
            [
                xs[source][(ids[source] == expert).any(1)]
                for expert in (2 * rank, 2 * rank + 1)
                for source in range(2)
            ]
        )
        for kind, (codes, scales, numbers) in answer.items():
            values, exponents = formats.quantized(expected, kind, 0)
            assert sum(numbers) == len(expected)
            stored = formats.values_of(torch.tensor(codes, dtype=torch.uint8), kind)
            assert torch.equal(stored, values)
            assert torch.equal(torch.tensor(scales)[:, :33], exponents.long())
            assert not torch.tensor(scales)[:, 33:].any()


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [
        (lambda x: torch_npu.npu_dynamic_mx_quant(x), "dynamic_mx_quant.chip, documented"),
        (lambda x: torch_npu.npu_dynamic_mx_quant_with_dual_axis(x), "dual_axis_mx_quant.chip"),
        (
            lambda x: torch_npu.npu_grouped_dynamic_mx_quant(
                x, torch.tensor([4], dtype=torch.int32).npu()
            ),
            "grouped_mx_quant.chip",
        ),
    ],
)
def test_other_chips_refuse_shared_exponents(quantize, dtype):
    """By the chip's rule, or because they have no such dtype."""
    with pytest.raises(RuntimeError, match=rf"rule {dtype}|does not compute in float8, HiF8 or"):
        quantize(torch.ones(4, 64).bfloat16().npu())


def test_other_chips_refuse_float8():
    x = torch.ones(32, 32).to(torch.float8_e4m3fn).npu()
    with pytest.raises(
        RuntimeError, match="Ascend910B1 does not compute in float8, HiF8 or float4"
    ):
        torch_npu.npu_quant_matmul(x, x, torch.ones(1).npu(), output_dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError, match="Ascend910B1 does not compute in float8, HiF8 or float4"
    ):
        torch_npu.npu_dynamic_quant(torch.ones(4, 32).half().npu(), dst_type=torch.float8_e4m3fn)


def test_no_table_says_that_the_chip_lacks_them():
    lacks = chips.chip(CHIP).lacks
    assert not [name for name in lacks if "MxQuant" in name or "BlockQuant" in name]
