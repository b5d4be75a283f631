# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Methods of speculative decoding that the V1 runner does not support are refused by name."""

import functools
import importlib.util
import types

import pytest
from ascend_platform import extension
from ascend_platform.worker.v1 import unsupported


def config(method, stages=1, **uses):
    methods = ("dflash", "gemma4_mtp")
    asked = {f"use_{name}": functools.partial(uses.get, name, False) for name in methods}
    return types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(method=method, **asked),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=stages),
    )


@pytest.mark.parametrize("name", unsupported.DRAFTS)
def test_methods_are_refused_by_name_and_reason(name):
    with pytest.raises(extension.RefusedError, match=rf"with {name} is not supported: [^\n]+$"):
        unsupported.check(config(name, **{name: True}))


def test_without_numba_there_is_no_ngram(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        extension.RefusedError,
        match=r"ngram needs numba; fix: pip install 'ascend-platform\[ngram\]'",
    ):
        unsupported.check(config("ngram"))


@pytest.mark.parametrize("name", unsupported.VERIFICATIONS)
def test_verifications_are_refused_by_name_and_reason(name):
    asked = config("eagle")
    asked.speculative_config.rejection_sample_method = name
    with pytest.raises(
        extension.RefusedError, match=rf"method {name} of [^\n]+ not supported: [^\n]+; fix: "
    ):
        unsupported.check(asked)


@pytest.mark.parametrize("method", ["eagle", "draft_model", "mtp", "ngram", "ngram_gpu"])
def test_pipelines_are_refused_with_each_method(method):
    with pytest.raises(
        extension.RefusedError, match=rf"with {method} in 2 pipeline stages [^\n]+; fix: "
    ):
        unsupported.check(config(method, stages=2))
