# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Plugin of test_seeded_faults.py: the fused attention, with a fault in each layer ($SEEDED_FAULT)."""

import itertools
import os
from typing import Any

import torch
from ascend_attention.dense import FusedAttentionBackend, FusedAttentionImpl

FAULT = os.environ["SEEDED_FAULT"]
SIZES = itertools.count(1)


class Impl(FusedAttentionImpl):
    """The fused attention with the fault."""

    def _mask_args(self, meta: Any) -> dict[str, Any]:
        if FAULT == "mask":
            return {"atten_mask": meta.mask, "sparse_mode": 3}
        return super()._mask_args(meta)

    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if FAULT == "bucketize":
            numbers = torch.arange(len(query), device=query.device)
            torch.bucketize(numbers, numbers)
        if FAULT == "compilation":  # Of an operator with another shape at each call.
            numbers = torch.ones(next(SIZES), device=query.device)
            torch.npu.set_compile_mode(jit_compile=True)
            numbers.abs()
            torch.npu.set_compile_mode(jit_compile=False)
        if FAULT == "wait":
            torch.npu.synchronize()
        return super().forward(layer, query, *args, **kwargs)


class Backend(FusedAttentionBackend):
    """The backend of the faulty attention."""

    impl_cls = Impl
