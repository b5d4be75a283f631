"""Host-to-device copies of the V2 runner's states: from pinned memory, and only of what has changed."""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d

from ascend_platform.vllm_overrides import override


def is_uva_available() -> bool:
    """False: kernels of the NPU do not read host memory."""
    return False


class PinnedBufferPool:
    """vLLM's UvaBufferPool, whose views are tensors on the device.

    torch_npu keeps pinned memory until the copy from it has run, so that no ring of buffers is needed.
    """

    def __init__(self, size: Any, dtype: torch.dtype, max_concurrency: int | None = None) -> None:
        self.dtype = dtype

    def copy_to_uva(self, x: Any) -> torch.Tensor:
        return async_tensor_h2d(x, device=current_platform.device_type, dtype=self.dtype)

    def copy_to_gpu(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return async_tensor_h2d(x, device=current_platform.device_type, dtype=self.dtype, out=out)


def copy_changed(tensor: Any, n: int | None = None) -> torch.Tensor:
    """Copy a UvaBackedTensor's host values to its device tensor, if they are not those of the last copy.

    Replaces ``UvaBackedTensor.copy_to_uva``; the device tensor keeps its address.
    """
    values = tensor.np[:n]
    if not hasattr(tensor, "sent"):
        tensor.sent = np.zeros_like(tensor.np)  # as vLLM's __init__ has copied it
    if not np.array_equal(values, tensor.sent[:n]):
        tensor.sent[:n] = values
        async_tensor_h2d(values, out=tensor.gpu[:n])
    return tensor.gpu[:n]


def apply_write(tensor: Any) -> None:
    """Scatter a StagedWriteTensor's staged pieces of rows into its device tensor; replaces ``StagedWriteTensor.apply_write``."""
    if not tensor._staged_write_indices:
        return
    ends = np.array(tensor._staged_write_cu_lens)
    lengths = np.diff(ends, prepend=0)
    starts = np.array(tensor._staged_write_indices) * tensor.gpu.stride(0) + np.array(tensor._staged_write_starts)
    elements = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
    contents = async_tensor_h2d(tensor._staged_write_contents, device=tensor.device, dtype=tensor.dtype)
    tensor.gpu.view(-1).index_put_((async_tensor_h2d(elements, device=tensor.device),), contents)
    tensor.clear_staged_writes()


def install() -> None:
    override("vllm.utils.platform_utils:is_uva_available", is_uva_available)
    override("vllm.v1.worker.gpu.buffer_utils:UvaBufferPool", PinnedBufferPool)
    override("vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.copy_to_uva", copy_changed)
    override("vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.apply_write", apply_write)
