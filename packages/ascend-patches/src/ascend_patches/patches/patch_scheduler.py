# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An image whose tokens attend to each other is split between two steps."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs",
    scope="engine",
    vllm=">=0.32,<0.33",
    reason=(
        "with Gemma 3 and 4, an image that a step begins with and does not complete is split, and"
        " its tokens do not attend to the later ones"
    ),
    upstream="no issue is known; vLLM 0.33 compares with `<=` instead of `<` in this method",
    remove_when="the lowest supported vLLM is 0.33",
    fingerprint="28c64727fee1",
)
def keep_images_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(
        self: Any, request: Any, computed: int, new: int, budget: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self.scheduler_config.disable_chunked_mm_input and not self.is_encoder_decoder:
            positions = (feature.mm_position for feature in request.mm_features or ())
            if any(each.offset == computed and new < each.length for each in positions):
                return [], 0, budget, [], []
        return original(self, request, computed, new, budget, *args, **kwargs)

    return replacement
