# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""OLMo-hybrid's checkpoints cannot be loaded."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target=(
        "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn:_make_fused_conv1d_weight_loader"
    ),
    scope="worker",
    vllm=">=0.31,<0.34",
    reason=(
        "OLMo-hybrid's convolutions of query, key and value, which vLLM keeps as one, cannot be"
        " loaded (`TypeError`)"
    ),
    upstream=(
        "no issue is known; WeightsMapper (vllm/model_executor/models/utils.py) hands the part on"
        " as an attribute, shard_id"
    ),
    remove_when="the loader reads the attribute, as MergedColumnParallelLinear's does",
    fingerprint="a9e22431b41d",
)
def make_fused_conv1d_weight_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        load = original(*args, **kwargs)

        def weight_loader(
            param: Any, loaded_weight: Any, loaded_shard_id: int | None = None
        ) -> None:
            load(
                param,
                loaded_weight,
                (
                    getattr(loaded_weight, "shard_id", None)
                    if loaded_shard_id is None
                    else loaded_shard_id
                ),
            )

        return weight_loader

    return replacement
