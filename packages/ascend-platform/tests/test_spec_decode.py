# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Speculative decoding in vLLM's configuration: drafters that are refused with any model runner, and
what is kept."""

import copy
import functools
import types

import pytest
from ascend_platform import extension
from ascend_platform.config import features, model_runner, unsupported
from ascend_platform.runners.features import FEATURES


def config(method, architecture="DeepSeekMTPModel", **uses):
    methods = ("dflash", "gemma4_mtp")
    asked = {f"use_{name}": functools.partial(uses.get, name, False) for name in methods}
    drafter = types.SimpleNamespace(architectures=[architecture])
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(),
        speculative_config=types.SimpleNamespace(
            method=method, draft_model_config=drafter, **asked
        ),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=types.SimpleNamespace(async_scheduling=True),
    )


@pytest.fixture(params=[True, False], ids=["V2", "V1"])
def with_each_runner(request, monkeypatch):
    monkeypatch.setattr(features, "rows", lambda: FEATURES)
    monkeypatch.setattr(
        model_runner, "choice", lambda _: model_runner.Choice(request.param, "a test")
    )


@pytest.mark.usefixtures("with_each_runner")
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (config("mtp", "OpenPanguMTPModel"), "openPangu's MTP, which fails in vLLM's drafter"),
        (config("dflash", dflash=True), "dflash drafters, which need non-causal attention"),
        (config("mtp", gemma4_mtp=True), "gemma4_mtp drafters, which capture CUDA graphs"),
    ],
    ids=["openPangu", "dflash", "gemma4_mtp"],
)
def test_method_is_refused_by_name_and_reason(asked, named):
    with pytest.raises(
        extension.RefusedError, match=rf"support {named}[^\n]* yet; fix: choose another method$"
    ):
        unsupported.check_features(asked)


@pytest.mark.usefixtures("with_each_runner")
@pytest.mark.parametrize("is_async", [True, False])
def test_other_methods_are_kept_as_they_are(is_async):
    asked = config("eagle")
    asked.scheduler_config.async_scheduling = is_async
    before = copy.deepcopy(asked.scheduler_config)
    unsupported.check_features(asked)
    assert asked.scheduler_config == before
