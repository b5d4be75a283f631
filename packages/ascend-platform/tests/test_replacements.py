# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Replaced weights: the methods of vLLM's worker that leave weights as they are."""

from ascend_platform.process import replacements
from vllm.v1.worker.gpu_worker import Worker


def test_methods_that_leave_weights_are_those_of_vllms_worker() -> None:
    """A method that a later vLLM adds counts as one that replaces weights until it is named here."""
    of_vllm = {name for name in dir(Worker) if not name.startswith("_")}
    replace = {
        "apply_model",
        "discard",
        "elastic_ep_execute",
        "finish_weight_update",
        "load_model",
        "reload_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_config",
        "update_weights",
        "wake_up",
    }
    assert replace <= of_vllm
    assert not replace & replacements.READS
    # Some are not in each version.
    assert len(replacements.READS - of_vllm) < 5
