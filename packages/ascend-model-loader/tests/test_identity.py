# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Comparison of weight identities."""

from ascend_model_loader import identity


def test_checkpoints_are_compared_by_content_else_by_name() -> None:
    local_identity = {"name": "n", "checkpoint": "c", "dtype": "d"}
    assert identity.differences(local_identity | {"name": "m"}, local_identity) == ""
    assert identity.differences(local_identity | {"checkpoint": ""}, local_identity) == ""
    assert identity.differences({"dtype": "\x1b[31m"}, local_identity) == (
        "name: the peer has None, this engine n; dtype: the peer has ?[31m, this engine d"
    )
    assert (
        identity.registry_key(local_identity)
        == identity.registry_key(local_identity | {"name": "m", "checkpoint": "e"})
        != identity.registry_key(local_identity | {"dtype": "e"})
    )
