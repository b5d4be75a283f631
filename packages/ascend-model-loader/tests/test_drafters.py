# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Drafters are told from the target, whose weights are served."""

import json
from pathlib import Path
from typing import Any

import pytest
from ascend_model_loader.loader import is_target
from harness.engines.configuration import engine_config
from harness.models import small
from vllm.v1.spec_decode.draft_model import DraftModelProposer


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(small.TINY))
    return str(tmp_path)


def drafting(target: str, method: str, **options: Any) -> Any:
    """An engine's configuration with a method of speculative decoding."""
    drafts = {"method": method, "num_speculative_tokens": 1, **options}
    return engine_config(target, speculative_config=drafts)


def test_a_draft_model_is_not_the_target(model: str) -> None:
    """vLLM loads it with a configuration that has its model instead of the target's."""
    config = drafting(model, "draft_model", model=model)
    proposer = object.__new__(DraftModelProposer)
    proposer.vllm_config, proposer.speculative_config = config, config.speculative_config
    loaded_with = proposer._create_draft_vllm_config()
    assert loaded_with.model_config is config.speculative_config.draft_model_config
    assert is_target(config, config.model_config)
    assert not is_target(loaded_with, loaded_with.model_config)


def test_copied_configuration_of_a_drafter_is_not_the_target(model: str) -> None:
    """As vLLM makes it for the hidden states that it extracts."""
    config = drafting(model, "extract_hidden_states")
    assert is_target(config, config.model_config)
    assert not is_target(config, config.speculative_config.draft_model_config)
