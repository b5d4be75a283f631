"""vLLM's executor on Ray: what each node and each worker keeps to itself."""

from typing import TYPE_CHECKING, Any, cast

from ascend_platform.host import VISIBLE_NPUS
from ascend_platform.vllm_overrides import add

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def prepare(parallel: "ParallelConfig") -> None:
    """Leave to each node its own visible NPUs and address, and let each worker's shared memory end with the worker.

    vLLM hands the driver's variables on to workers that do not have them (``vllm/v1/executor/ray_executor_v2.py``). It ends
    workers by ``ray.kill``, which by default kills their children too: Python's resource tracker, which would remove the memory.
    """
    add("vllm.v1.executor.ray_utils:WORKER_SPECIFIC_ENV_VARS", [VISIBLE_NPUS, "HCCL_IF_IP"])
    given: dict[str, Any] = dict(parallel.ray_runtime_env or {})
    variables = {"RAY_kill_child_processes_on_worker_exit": "0"} | given.get("env_vars", {})
    parallel.ray_runtime_env = cast(Any, given | {"env_vars": variables})
