# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Schemes of FP8, MXFP8 and MXFP4: their matmuls in a process on Ascend 950, because a process sees
one chip, and their refusal on other chips."""

import re
import sys
from pathlib import Path

import pytest
from ascend_platform import host
from ascend_quantization.common import check_chip
from harness.engines import npus

CHIP = "Ascend950PR_9599"


def test_on_ascend950():
    # Without conftest.py: calls are noted for this session.
    pytest_of = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    tests = str(Path(__file__).with_name("schemes_of_950.py"))
    done = npus.run(1, *pytest_of, "--soc", CHIP, tests, ASCEND_EMULATOR_SOC=CHIP)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-20000:] + done.stderr[-5000:]
    assert done.returncode == 0
    assert int(passed[1]) == 21


@pytest.mark.parametrize(
    ("chip", "schemes", "named"),
    [
        (
            "Ascend910B1",
            ["W8A8_MXFP8", "W8A8"],
            (
                "the model has weights of W8A8_MXFP8, which are supported on Ascend 950; this NPU is"
                " Ascend910B1; fix: serve a checkpoint of W8A8, W8A8_DYNAMIC, W8A16, W4A16,"
                " W4A8_DYNAMIC, W4A16_MXFP4, or the unquantized model"
            ),
        ),
        (
            CHIP,
            ["W4A8_DYNAMIC", "W8A16"],
            "weights of W4A8_DYNAMIC, W8A16, which are supported on Atlas A2 and Atlas A3; this NPU",
        ),
        ("Ascend310P3", ["W8A16", "W8A8_MXFP8"], "which no chip has all of; this NPU is"),
    ],
)
def test_schemes_of_another_chip_are_refused(chip, schemes, named, monkeypatch):
    monkeypatch.setattr(host, "chip", lambda: chip)
    with pytest.raises(ValueError, match=re.escape(named)):
        check_chip(schemes)
