# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An engine core in a process of its own: what its start leaves behind, and its end with its
parent."""

import gc
import sys

from harness import checkout, npus


def test_engine_core_restores_the_collector_and_ends_with_parent() -> None:
    done = npus.run(
        1, sys.executable, str(checkout.PROGRAMS / "start_engine.py"), str(checkout.ADDER)
    )
    (found,) = npus.results(done.stdout)
    assert found["ended"]
    assert found["pid"] != found["parent"]
    assert "ascend-parent" in found["threads"]
    assert tuple(found["thresholds"]) == gc.get_threshold()
    assert found["frozen"] > 500_000  # what is imported
