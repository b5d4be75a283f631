"""vllm.engine.arg_utils:EngineArgs.create_engine_config lets only CUDA, ROCm and XPU balance the load of experts."""

from collections.abc import Callable
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    scope="platform",
    vllm=">=0.32,<0.33",
    reason="--enable-eplb is refused for all other devices; ascend-platform brings what else vLLM has for those alone",
    upstream="no issue is known; the check is in vllm/config/parallel.py, _validate_parallel_config",
    remove_when="vLLM asks the platform whether it has expert load balancing",
    fingerprint="b6ccce9e8c51",
)
def eplb_on_any_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # pydantic has taken the validator that refuses, so it is not what can be replaced; what it looks at is
        from vllm.config import parallel

        platform = parallel.current_platform
        parallel.current_platform = _AsCuda(platform)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            parallel.current_platform = platform

    return replacement


class _AsCuda:
    """A platform that is_cuda_alike, which vllm/config/parallel.py asks for expert load balancing alone."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)
