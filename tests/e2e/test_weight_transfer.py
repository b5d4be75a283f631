# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weight transfer from a trainer to a running engine over HCCL."""

import json
import sys

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus

PROGRAM = checkout.PROGRAMS / "update_weights.py"


@pytest.mark.parametrize(("ranks", "packed"), [(1, True)])
def test_tokens_are_those_of_the_weights_that_were_sent(ranks: int, packed: bool) -> None:
    case = layouts.case(
        f"{ranks} packed {packed}", layouts.ADDER, {layouts.TP: ranks} if ranks > 1 else {}
    ) | {"packed": packed}
    done = npus.run(
        1 + ranks,
        sys.executable,
        str(PROGRAM),
        json.dumps(case),
        VLLM_PLUGINS="",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ((random, sent, negated, again),) = npus.results(done.stdout)
    assert layouts.compare(layouts.ADDER, "bfloat16", sent)[:2] == (33, 0)
    assert layouts.compare(layouts.ADDER, "bfloat16", random)[1] > 10
    assert layouts.compare(layouts.ADDER, "bfloat16", negated)[1] > 10
    assert again == sent
