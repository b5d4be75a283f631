# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An image that must not be split: accepted by vLLM although it has more tokens than a step,
refused with the patch."""

import pytest
from harness.engines import scripts

NAME = "input_processor.refuse_images_beyond_a_step"
SCRIPT = """
from types import SimpleNamespace
from ascend_patches import enter
enter("platform")
import torch
from vllm.config import SchedulerConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine.input_processor import InputProcessor

def said(tokens, whole):
    processor = InputProcessor.__new__(InputProcessor)
    scheduler = SchedulerConfig.default_factory(max_num_batched_tokens=256, disable_chunked_mm_input=whole)
    processor.vllm_config = SimpleNamespace(
        scheduler_config=scheduler, speculative_config=None, num_prefill_lookahead_tokens=0
    )
    processor.model_config = SimpleNamespace(max_model_len=1024, runner_type="generate")
    processor.mm_encoder_cache_size, processor.skip_prompt_length_check = 256, False
    processor.renderer = SimpleNamespace(tokenizer=None, validate_token_ids=lambda ids: None)
    text = {"type": "token", "prompt_token_ids": [1] * 300}
    is_embed = torch.arange(tokens) < 250
    image = PlaceholderRange(offset=4, length=tokens, is_embed=is_embed)
    processor._validate_model_inputs(None, text)
    try:
        processor._validate_model_inputs(
            None, text | {"type": "multimodal", "mm_placeholders": {"image": [image]}}
        )
    except VLLMValidationError as error:
        return str(error)

print(said(257, True), said(257, False), said(256, True))
"""
REFUSED = (
    "an image, audio or video has 257 tokens, which this model computes in one step, of at most"
    " 256 tokens; fix: --max-num-batched-tokens 257 or more"
)


@pytest.mark.parametrize(
    ("disabled", "printed"), [("", f"{REFUSED} None None"), (NAME, "None None None")]
)
def test_an_image_beyond_a_step_is_refused(disabled, printed, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    assert done.stdout.splitlines()[-1:] == [printed], done.stdout + done.stderr
