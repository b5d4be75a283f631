# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Methods of speculative decoding that the V1 runner does not support are refused by name."""

import functools
import importlib.util
import types

import pytest
from ascend_platform import extension
from ascend_platform.config import features, model_runner, unsupported
from ascend_platform.runners import features as of_both
from ascend_platform.runners.v1 import features as of_v1


@pytest.fixture
def config(monkeypatch):
    """Make a configuration with draft tokens, for which V1 is chosen."""
    rows = [*of_both.FEATURES, *of_v1.FEATURES]
    drafting = [row for row in rows if "draft" in row.name or "speculative" in row.name]
    monkeypatch.setattr(features, "rows", lambda: drafting)
    monkeypatch.setattr(model_runner, "choice", lambda _: model_runner.Choice(False, "a test"))

    def make(method, stages=1, **uses):
        methods = ("dflash", "gemma4_mtp")
        asked = {f"use_{name}": functools.partial(uses.get, name, False) for name in methods}
        return types.SimpleNamespace(
            model_config=object(),
            speculative_config=types.SimpleNamespace(
                method=method, draft_model_config=None, **asked
            ),
            parallel_config=types.SimpleNamespace(pipeline_parallel_size=stages),
        )

    return make


@pytest.mark.parametrize("name", ["dflash", "gemma4_mtp"])
def test_methods_are_refused_by_name_and_reason(config, name):
    with pytest.raises(
        extension.RefusedError, match=rf"support {name} drafters, which [^\n]+; fix: choose another"
    ):
        unsupported.check_features(config(name, **{name: True}))


def test_without_numba_there_is_no_ngram(config, monkeypatch):
    monkeypatch.setattr(of_v1, "choice", model_runner.choice)
    of_v1.check(config("eagle"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        extension.RefusedError,
        match=r"ngram needs numba; fix: pip install 'ascend-platform\[ngram\]'",
    ):
        of_v1.check(config("ngram"))


@pytest.mark.parametrize("name", ["block", "fly"])
def test_verifications_are_refused_by_name(config, name):
    asked = config("eagle")
    asked.speculative_config.rejection_sample_method = name
    with pytest.raises(
        extension.RefusedError,
        match=rf"support block verification and FLy of draft tokens \({name}\) yet; fix: ",
    ):
        unsupported.check_features(asked)


@pytest.mark.parametrize("method", ["eagle", "draft_model", "mtp", "ngram", "ngram_gpu"])
def test_pipelines_are_refused_with_each_method(config, method):
    with pytest.raises(
        extension.RefusedError,
        match=r"support speculative decoding [^\n]*by n-grams with pipeline parallelism [^\n]*yet; fix: --pip",
    ):
        unsupported.check_features(config(method, stages=2))
