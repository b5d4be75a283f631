"""States of the V2 runner's requests on the device: new ones are written with one copy."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.states import RequestState

from ascend_platform.vllm_overrides import override
from ascend_platform.worker.v2.buffers import copy_together, staged


class NPURequestState(RequestState):
    """RequestState whose lengths are one tensor.

    Attributes:
        lengths: number of computed and of known tokens, of the prompt's tokens and of the prefill's, int32 ``[4, states]``. The
            first two are current in steps that read them alone, see ``HostInputs``.
        indices: buffer of a decode step's indices, int64 ``[2 * states]``, see ``HostInputs``.
    """

    num_computed_tokens: Any
    total_len: Any
    all_token_ids: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        tensors: tuple[Any, ...] = (self.num_computed_tokens, self.total_len, self.prompt_len, self.prefill_len)
        self.lengths = torch.stack([tensor.gpu for tensor in tensors])
        for tensor, row in zip(tensors, self.lengths, strict=True):
            tensor.gpu = row
        self.indices = torch.empty(2 * self.max_num_reqs, dtype=torch.int64, device=self.lengths.device)

    def apply_staged_writes(self) -> None:
        """Write new requests after one copy, by one operator for their lengths and one for their tokens."""
        rows = np.array(self.total_len._staged_write_indices)
        if not len(rows):
            return
        prompts, known = self.prompt_len.np[rows], self.prefill_len.np[rows]
        lengths = np.stack((self.num_computed_tokens_np[rows], known, prompts, known))
        tokens = self.all_token_ids
        sent_rows, sent, elements, contents = copy_together([rows, lengths, *staged(tokens)], tokens.device)
        self.lengths.index_copy_(1, sent_rows, sent)
        tokens.gpu.view(-1).index_put_((elements,), contents)
        for tensor in (self.total_len, self.num_computed_tokens, tokens):
            tensor.clear_staged_writes()


def install() -> None:
    override("vllm.v1.worker.gpu.states:RequestState", NPURequestState)
