# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""OLMo-hybrid's checkpoints cannot be loaded."""

from collections.abc import Callable
from typing import Any


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
