"""The components' configuration and the summary line, once per process."""

import functools
from typing import TYPE_CHECKING

from ascend_platform import extension
from ascend_platform.attention import selector

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def announce(vllm_config: "VllmConfig") -> None:
    """Take the configuration of the components and log the summary line, once per process.

    Called where each process first has the configuration with all plugins loaded: ``check_and_update_config`` in the
    API server, ``register_custom_kv_cache_specs`` in the engine core, ``NPUWorker`` in a worker.
    """
    extension.join("ascend-platform", "ascend", api=extension.API_VERSION)
    extension.configure(vllm_config.additional_config)
    if vllm_config.model_config is not None:
        _log_once(extension.summary(selector.describe_backend(vllm_config)))


@functools.cache
def _log_once(line: str) -> None:
    extension.logger.info(line)
