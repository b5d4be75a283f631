# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tokens of an image in a step: some with vLLM, all or none with the patch."""

from importlib.metadata import version

import pytest
from harness.engines import scripts

NAME = "scheduler.keep_images_whole"
SCRIPT = """
from types import SimpleNamespace
from ascend_patches import enter
enter("engine")
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
scheduler = Scheduler.__new__(Scheduler)
scheduler.scheduler_config = SimpleNamespace(disable_chunked_mm_input=True)
scheduler.is_encoder_decoder, scheduler.ec_connector = False, None
scheduler.encoder_cache_manager = EncoderCacheManager(100)
image = MultiModalFeatureSpec(None, "image", "a", PlaceholderRange(offset=10, length=20))
request = SimpleNamespace(
    request_id="a", has_encoder_inputs=True, mm_features=[image], get_num_encoder_embeds=lambda _: 20
)
def tokens(*steps):
    return [scheduler._try_schedule_encoder_inputs(request, *step, 100)[1] for step in steps]
found = tokens((0, 15), (10, 15), (10, 20), (15, 10), (15, 15))  # The last two behind a cached prefix.
scheduler.encoder_cache_manager.allocate(request, 0)
print(found + tokens((0, 15)))
"""


VLLM = {
    "0.31": "[10, 15, 20, 10, 15, 15]",
    "0.32": "[10, 15, 20, 10, 15, 10]",
    "0.33": "[10, 0, 20, 10, 15, 10]",
}


@pytest.mark.parametrize(
    ("disabled", "printed"),
    [("", "[10, 0, 20, 0, 15, 10]"), (NAME, VLLM[version("vllm")[:4]])],
)
def test_an_image_is_not_split(disabled, printed, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    assert done.stdout.splitlines()[-1:] == [printed], done.stdout + done.stderr
