# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fill vLLM's cache of model infos with every architecture of its registry.

At a miss vLLM imports itself in a new process, for each architecture: seven seconds of a processor.
One process that has imported vLLM needs two seconds for all of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def fill() -> None:
    """In a fork, so that this process does not have the modules of all models; once per cache."""
    from vllm import envs

    complete = Path(envs.VLLM_CACHE_ROOT) / "modelinfos" / "complete"
    if complete.exists():
        return
    child = os.fork()
    if not child:
        with contextlib.suppress(Exception):  # An incomplete cache costs time only.
            _inspect_all()
            complete.touch()
        os._exit(0)
    os.waitpid(child, 0)


def _inspect_all() -> None:
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # This process is the one that vLLM would start.
    registry._run_in_subprocess = lambda fn: fn()
    for model in registry.ModelRegistry.models.values():
        if isinstance(model, registry._LazyRegisteredModel):
            with contextlib.suppress(Exception):  # Its package is not installed.
                model.inspect_model_cls()
