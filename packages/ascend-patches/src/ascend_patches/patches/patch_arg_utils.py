# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``--enable-eplb``, which vLLM refuses on other devices than CUDA, ROCm and XPU."""

import sys
from collections.abc import Callable
from typing import Any

from ascend_patches import patch

CHECK = "_validate_parallel_config"
"""The validator of vllm/config/parallel.py that refuses it, by
``current_platform.is_cuda_alike()``."""


@patch(
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    scope="platform",
    vllm=">=0.31,<0.34",
    reason=(
        "`--enable-eplb` is refused on the NPU, for which ascend-platform maps and counts the"
        " experts"
    ),
    upstream=(
        "no issue is known; the check is in vllm/config/parallel.py, _validate_parallel_config"
    ),
    remove_when="vLLM asks the platform whether it has expert load balancing",
    fingerprint=["edcadc3d5a7a", "b6ccce9e8c51", "c76f3ef87e1f"],
)
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
