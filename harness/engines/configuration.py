# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of engines, as ``vllm serve`` makes them."""

from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs


def engine_config(path: str, **arguments: Any) -> VllmConfig:
    """The configuration of an engine for the model in a directory, with arguments of vLLM's
    EngineArgs."""
    return EngineArgs(model=path, skip_tokenizer_init=True, **arguments).create_engine_config()
