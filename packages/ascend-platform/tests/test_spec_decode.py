# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Speculative decoding in vLLM's configuration: what is refused, by its name, and what is kept."""

import functools
import types

import pytest
from ascend_platform import extension
from ascend_platform.config import unsupported


def config(method, **uses):
    methods = ("dflash", "gemma4_mtp", "ngram_gpu")
    asked = {f"use_{name}": functools.partial(uses.get, name, False) for name in methods}
    drafter = types.SimpleNamespace(
        architectures=["OpenPanguMTPModel" if uses.get("openPangu's MTP") else "DeepSeekMTPModel"]
    )
    speculative = types.SimpleNamespace(method=method, draft_model_config=drafter, **asked)
    return types.SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=types.SimpleNamespace(async_scheduling=True),
    )


def test_method_is_refused_by_name_and_reason():
    asked = config("mtp", **{"openPangu's MTP": True}).speculative_config
    with pytest.raises(
        extension.RefusedError, match=r"with openPangu's MTP is not supported: [^\n]+$"
    ):
        unsupported.check_drafts(asked)


def test_asynchronous_scheduling_stays_as_it_is():
    for given in (True, False):
        asked = config("eagle")
        asked.scheduler_config.async_scheduling = given
        unsupported.check_drafts(asked.speculative_config)
        assert asked.scheduler_config.async_scheduling is given
