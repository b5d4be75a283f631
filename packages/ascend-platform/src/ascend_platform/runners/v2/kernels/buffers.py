# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""States of the V2 runner's requests on the device: copied from pinned memory, and only what has
changed."""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.states import RequestState


def is_uva_available() -> bool:
    """False: kernels of the NPU do not read host memory."""
    return False


class KnownTensor(torch.Tensor):
    """A tensor on the device whose values the host knows, so that they are not copied to it.
    Operators return plain tensors."""

    on_host: np.ndarray
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor, on_host: np.ndarray) -> "KnownTensor":
        """The tensor, which shares its memory, with its values."""
        known = tensor.as_subclass(cls)
        known.on_host = on_host
        return known


class PinnedBufferPool:
    """vLLM's UvaBufferPool, whose views are tensors on the device.

    torch_npu keeps pinned memory until the copy from it has run, so that no ring of buffers is
    needed.
    """

    def __init__(self, size: Any, dtype: torch.dtype, max_concurrency: int | None = None) -> None:
        self.dtype = dtype

    def copy_to_uva(self, x: Any) -> torch.Tensor:
        return async_tensor_h2d(x, device=current_platform.device_type, dtype=self.dtype)

    def copy_to_gpu(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return async_tensor_h2d(x, device=current_platform.device_type, dtype=self.dtype, out=out)


def copy_changed(tensor: Any, n: int | None = None) -> torch.Tensor:
    """Copy a UvaBackedTensor's host values to its device tensor, if they are not those of the last
    copy.

    Replaces ``UvaBackedTensor.copy_to_uva``; the device tensor keeps its address, and nothing else
    writes to it. Values are compared as bytes, in a tenth of the time that numpy takes.
    """
    values = tensor.np[:n]
    data = values.tobytes()
    if not hasattr(tensor, "sent"):
        tensor.sent = bytes(tensor.np.nbytes)  # as vLLM's __init__ has copied it
    if not tensor.sent.startswith(data):
        tensor.sent = data + tensor.sent[len(data) :]
        async_tensor_h2d(values, out=tensor.gpu[:n])
    return tensor.gpu[:n]


class SentInputs:
    """Arrays that the last step has copied to the device; the next step copies those
    that differ."""

    def __init__(self) -> None:
        self._sent: dict[int | None, tuple[bytes, torch.Tensor]] = {}

    def copy(
        self,
        array: np.ndarray,
        device: Any = None,
        dtype: torch.dtype | None = None,
        out: Any = None,
    ) -> torch.Tensor:
        """Like async_tensor_h2d, but steps share the result, which no other code writes."""
        key, data = None if out is None else out.data_ptr(), array.tobytes()
        sent = self._sent.get(key)
        if sent is None or sent[0] != data:
            sent = self._sent[key] = data, async_tensor_h2d(array, device, dtype, out)
        return sent[1]

    def forget(self) -> None:
        """Copy all arrays in the next step: a dummy run or a capture has written to the input
        buffers."""
        self._sent.clear()


def copy_each(*copies: tuple[np.ndarray, torch.Tensor]) -> None:
    """Copy arrays to tensors of the same dtype and shape, from one allocation of pinned memory,
    which takes as long as a copy."""
    staged = torch.empty(
        sum(array.nbytes for array, _ in copies), dtype=torch.uint8, pin_memory=True
    )
    on_host, start = staged.numpy(), 0
    for array, tensor in copies:
        end = start + array.nbytes
        on_host[start:end] = array.view(np.uint8)
        tensor.copy_(staged[start:end].view(tensor.dtype), non_blocking=True)
        start = end


def copy_together(arrays: list[np.ndarray], device: Any) -> list[torch.Tensor]:
    """Copy arrays to the device at once, as parts of one tensor; each begins at a multiple of 32
    bytes."""
    ends = np.cumsum([0, *(-(-array.nbytes // 32) * 32 for array in arrays)])
    packed = np.zeros(ends[-1], np.uint8)
    for array, start in zip(arrays, ends, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = async_tensor_h2d(packed, device=device)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, ends, strict=False)
    ]


def staged(tensor: Any) -> tuple[np.ndarray, np.ndarray]:
    """Elements of a StagedWriteTensor that are to be written, and their contents."""
    ends = np.array(tensor._staged_write_cu_lens)
    lengths = np.diff(ends, prepend=0)
    starts = np.array(tensor._staged_write_indices) * tensor.gpu.stride(0) + np.array(
        tensor._staged_write_starts
    )
    elements = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
    return elements, torch.tensor(tensor._staged_write_contents, dtype=tensor.dtype).numpy()


def apply_writes(*tensors: Any) -> None:
    """Scatter the staged pieces of rows of StagedWriteTensors into their device tensors, after one
    copy of them all."""
    written = [tensor for tensor in tensors if tensor._staged_write_indices]
    if not written:
        return
    sent = copy_together(
        [array for tensor in written for array in staged(tensor)], written[0].device
    )
    for tensor, elements, contents in zip(written, sent[::2], sent[1::2], strict=True):
        tensor.gpu.view(-1).index_put_((elements,), contents)
        tensor.clear_staged_writes()


class NPURequestState(RequestState):
    """RequestState whose token counts are one tensor.

    Attributes:
        lengths: number of computed and of known tokens, of tokens of the prompt and of the
            prefill, int32 ``[4, states]``. The first two are current only in steps that read
            them, see ``HostStep``.
        indices: buffer of a decode step's indices, int64 ``[2 * states]``, see ``HostStep``.
    """

    num_computed_tokens: Any
    total_len: Any
    all_token_ids: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        tensors: tuple[Any, ...] = (
            self.num_computed_tokens,
            self.total_len,
            self.prompt_len,
            self.prefill_len,
        )
        self.lengths = torch.stack([tensor.gpu for tensor in tensors])
        for tensor, row in zip(tensors, self.lengths, strict=True):
            tensor.gpu = row
        self.indices = torch.empty(
            2 * self.max_num_reqs, dtype=torch.int64, device=self.lengths.device
        )

    def apply_staged_writes(self) -> None:
        """Write new requests after one copy, by one operator for their token counts and one for
        their tokens."""
        rows = np.array(self.total_len._staged_write_indices)
        if not len(rows):
            return
        prompts, known = self.prompt_len.np[rows], self.prefill_len.np[rows]
        lengths = np.stack((self.num_computed_tokens_np[rows], known, prompts, known))
        tokens = self.all_token_ids
        sent_rows, sent, elements, contents = copy_together(
            [rows, lengths, *staged(tokens)], tokens.device
        )
        self.lengths.index_copy_(1, sent_rows, sent)
        tokens.gpu.view(-1).index_put_((elements,), contents)
        for tensor in (self.total_len, self.num_computed_tokens, tokens):
            tensor.clear_staged_writes()
