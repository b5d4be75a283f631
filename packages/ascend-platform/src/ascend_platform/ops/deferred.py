# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of a layer that only the reader for which they are meant takes in their own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class DeferredTensor(torch.Tensor):
    """A tensor whose elements are computed where a function of torch reads them."""

    def computed(self) -> torch.Tensor:
        """The plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: Any = (), named: Any = None
    ) -> Any:
        arguments, named = tree_map_only(cls, cls.computed, (arguments, named or {}))
        return function(*arguments, **named)
