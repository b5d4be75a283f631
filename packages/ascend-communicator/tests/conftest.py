# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of one run of ranks.py on two NPUs, for the tests of this directory."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.engines import npus

SCRIPT = Path(__file__).with_name("ranks.py")
# As recipes for several Atlas A2 machines set them. With these, an operator of MC2 that is not told
# its algorithm takes "hierarchy", which these two ranks do not have.
VARIABLES = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0", "VLLM_PLUGINS": ""}


@pytest.fixture(scope="session")
def scenarios() -> dict[str, list[dict[str, Any]]]:
    done = npus.run(2, sys.executable, str(SCRIPT), **VARIABLES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
