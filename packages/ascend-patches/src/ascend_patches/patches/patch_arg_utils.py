# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``--enable-eplb``, which vLLM refuses on other devices than CUDA, ROCm and XPU."""

import sys
from collections.abc import Callable
from typing import Any

CHECK = "_validate_parallel_config"
"""The validator of vllm/config/parallel.py that refuses it, by
``current_platform.is_cuda_alike()``."""


def eplb_on_any_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # pydantic has already compiled the validator, so replace the platform that it consults
        # instead.
        from vllm.config import parallel

        platform = parallel.current_platform
        parallel.current_platform = _EplbPlatform(platform)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            parallel.current_platform = platform

    return replacement


class _EplbPlatform:
    """A platform that is CUDA-alike for the check of EPLB, and itself for everything else in
    vllm/config/parallel.py."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def is_cuda_alike(self) -> bool:
        return sys._getframe(1).f_code.co_name == CHECK or self.platform.is_cuda_alike()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)
