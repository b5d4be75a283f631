# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An image that must not be split, and has more tokens than a step, is never computed."""

from collections.abc import Callable
from typing import Any


def refuse_images_beyond_a_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, encoder_input: Any, decoder_input: Any) -> None:
        original(self, encoder_input, decoder_input)
        scheduler = self.vllm_config.scheduler_config
        media = decoder_input.get("mm_placeholders") or {}
        if encoder_input is None and media and scheduler.disable_chunked_mm_input:
            longest = max(each.length for found in media.values() for each in found)
            drafts = self.vllm_config.speculative_config
            most = scheduler.max_num_batched_tokens
            reserved = drafts.max_num_new_slots_for_drafting if drafts else 0
            most = min(scheduler.max_num_scheduled_tokens or most, most - reserved)
            most -= self.vllm_config.num_prefill_lookahead_tokens
            if longest > most:
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(
                    f"an image, audio or video has {longest} tokens, which this model computes in"
                    f" one step, of at most {most} tokens; fix: --max-num-batched-tokens"
                    f" {scheduler.max_num_batched_tokens + longest - most} or more"
                )

    return replacement
