# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check launches`, with a trace: what precedes latent attention in a decode step, by
single and fused operators.

    python harness/programs/count_preprocessing.py '{"hidden_size": 7168, ...}' 16

The arguments are a configuration of DeepSeek-V3's architecture and the number of requests. Prints
`RESULT {json}` for each way: what it launches, and how far its query and KV cache are at most from
those of single operators, whose rotated elements are put in the order of the others: halves instead
of pairs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from harness.engines import trace

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The query's latent and rotated parts, ``[tokens, heads, 512 or 64]``, and the pages of both
parts."""


def main(config: dict[str, Any], tokens: int) -> None:
    torch.manual_seed(0)
    torch.npu.config.allow_internal_format = True  # the prolog's weights are in FRACTAL_NZ
    hidden, low, latent, rotated = (
        config[name] for name in ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16().npu()

    x, down, up = (
        weight(tokens, hidden),
        weight(low + latent + rotated, hidden),
        weight(heads * (nope + rotated), low),
    )
    up_key = (torch.randn(heads, nope, latent) / nope**0.5).bfloat16().npu()
    norms = [torch.rand(size).bfloat16().npu() + 0.5 for size in (low, latent)]
    angles = torch.rand(1024, rotated // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16().npu()
    positions, slots = (
        torch.arange(tokens).npu() + 65,
        torch.arange(tokens, dtype=torch.int32).npu() * 64,
    )
    # Once per step, for all layers.
    cos, sin = (part.repeat(1, 2).contiguous() for part in table[positions].chunk(2, -1))
    in_out = [
        torch_npu.npu_format_cast(each.t().contiguous(), 29)
        for each in (down[:low], up, down[low:])
    ]
    wide_slots = slots.long()
    torch.npu.synchronize()

    def pages() -> list[torch.Tensor]:
        return [
            torch.zeros(8, 128, 1, size, dtype=torch.bfloat16, device="npu")
            for size in (latent, rotated)
        ]

    def query(low_query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.nn.functional.linear(
            torch_npu.npu_rms_norm(low_query, norms[0], 1e-6)[0], up
        ).view(tokens, heads, -1)
        absorbed = both.new_empty(tokens, heads, latent)
        torch.bmm(both[..., :nope].transpose(0, 1), up_key, out=absorbed.transpose(0, 1))
        return absorbed, both[..., nope:]

    def single_operators(caches: list[torch.Tensor]) -> Outputs:
        low_query, kv = torch.nn.functional.linear(x, down).split([low, latent + rotated], -1)
        latents, key = kv.split([latent, rotated], -1)
        latents = torch_npu.npu_rms_norm(latents, norms[1], 1e-6)[0]
        absorbed, rope = query(low_query)
        parts = rope.reshape(tokens, -1), key.reshape(tokens, -1)
        style = {"mrope_section": [0, 0, 0], "rotary_mode": "interleave", "cache_mode": "default"}
        rope, key = torch_npu.npu_mrope(positions, *parts, table, rotated, **style)
        rope, key = rope.view(tokens, heads, rotated), key.view(tokens, 1, rotated)
        torch_npu.npu_scatter_pa_kv_cache(
            latents.view(tokens, 1, -1), key, *caches, slots, cache_mode="Norm"
        )
        return absorbed, rope, *caches

    def norm_and_cache(caches: list[torch.Tensor]) -> Outputs:
        low_query, kv = torch.nn.functional.linear(x, down).split([low, latent + rotated], -1)
        each = [part.view(tokens, 1, 1, rotated) for part in (cos, sin)]
        torch_npu.npu_kv_rmsnorm_rope_cache(
            kv.reshape(tokens, 1, 1, -1),
            norms[1],
            *each,
            wide_slots,
            caches[1],
            caches[0],
            epsilon=1e-6,
            cache_mode="PA",
        )
        absorbed, rope = query(low_query)
        rope = torch_npu.npu_interleave_rope(rope.reshape(tokens, heads, 1, rotated), *each)
        return absorbed, rope.view(tokens, heads, rotated), *caches

    def prolog(caches: list[torch.Tensor]) -> Outputs:
        given = x, in_out[0], in_out[1], up_key, in_out[2], *norms, sin, cos, *caches
        absorbed, rope, *_ = torch_npu.npu_mla_prolog_v3(
            *given,
            cache_index=wide_slots,
            rmsnorm_epsilon_cq=1e-6,
            rmsnorm_epsilon_ckv=1e-6,
            cache_mode="PA_BSND",
        )
        return absorbed, rope, *caches

    def halves(part: torch.Tensor) -> torch.Tensor:
        return (
            part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            if part.shape[-1] == rotated
            else part
        )

    ways: list[Callable[[list[torch.Tensor]], Outputs]] = [single_operators, norm_and_cache, prolog]
    expected: list[torch.Tensor] = []
    for way in ways:
        caches, before = pages(), len(trace.events())
        outputs = way(caches)
        launched = [
            event["name"]
            for event in trace.events()[before:]
            if event["cat"] == "operator" and event["args"]["bytes"]
        ]
        expected = expected or [halves(part) for part in outputs]
        max_diff = 0.0
        if way is not single_operators:
            max_diff = max(
                float((one.float() - other.float()).abs().max())
                for one, other in zip(outputs, expected, strict=True)
            )
        print(
            "RESULT",
            json.dumps({"name": way.__name__, "operators": launched, "far": max_diff}),
            flush=True,
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
