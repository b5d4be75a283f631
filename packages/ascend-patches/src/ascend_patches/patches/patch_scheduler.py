# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An image whose tokens attend to each other is split between two steps."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs",
    scope="engine",
    vllm=">=0.31,<0.34",
    reason=(
        "with Gemma 3 and 4, an image that a step begins with, or begins within, and does not"
        " complete is split, and its tokens do not attend to the later ones; with 0.31 also one"
        " that the encoder cache has"
    ),
    upstream=(
        "no issue is known; vLLM 0.33 compares with `<=` instead of `<` in this method, but a step"
        " that begins behind a cached prefix begins within an image"
    ),
    remove_when="the method does not split an image of which a prefix is cached",
    fingerprint=["daf24951f7aa", "28c64727fee1", "6276aaa5281a"],
)
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
