# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An image whose tokens attend to each other is split between two steps."""

from collections.abc import Callable
from typing import Any


def keep_images_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(
        self: Any,
        request: Any,
        computed: int,
        new: int,
        budget: int,
        shift_computed_tokens: int = 0,
    ) -> Any:
        if self.scheduler_config.disable_chunked_mm_input and not self.is_encoder_decoder:
            for feature in request.mm_features or ():
                start = feature.mm_position.offset
                if start < computed + new < start + feature.mm_position.length:
                    new = max(0, start - computed - shift_computed_tokens)
                    break
        return original(self, request, computed, new, budget, shift_computed_tokens)

    return replacement
