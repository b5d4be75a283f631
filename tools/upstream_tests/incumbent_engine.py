# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vllm-ascend on the emulated NPU: answers of a model as JSON, with two of its operators in torch (see incumbent.py).

incumbent_engine.py MODEL DTYPE OUTPUT
incumbent_engine.py --null PROGRAM ARGUMENT...     a program of tools/bench, where operators compute nothing
"""

import json
import os
import random
import runpy
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", COMPILE_CUSTOM_KERNELS="0", HF_HUB_OFFLINE="1"
)
import torch

# Batches of at most 128 tokens: chunked prefill, and prefill beside decode.
LENGTHS = (5, 1, 17, 300, 130, 128)


class SlotMapping:
    """`_compute_slot_mapping_kernel`, vllm-ascend's one Triton kernel on this path without a
    fallback, in torch operators."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launch(grid[0] - 1, *args, **options)

    def launch(
        self, requests: int, tokens: int, most: int, *tensors: Any, PAD_ID: int = -1, **_: Any
    ) -> None:
        starts, positions, table, stride, block_size, slots = tensors
        index = torch.arange(tokens, device=positions.device, dtype=torch.int32)
        request = (index[:, None] >= starts[None, 1 : requests + 1]).sum(1).clamp(max=requests - 1)
        block = torch.div(positions[:tokens], block_size, rounding_mode="floor")
        number = table[request, block.clamp(max=stride - 1)]
        slots[:tokens].copy_(number * block_size + positions[:tokens] - block * block_size)
        slots[tokens:most].fill_(PAD_ID)


class NullSlotMapping:
    """The same kernel where nothing is computed: one launch, as Triton's is."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **_: args[-1].fill_(0)


def gating(
    x: torch.Tensor, k: int, *args: Any, bias_opt: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vllm-ascend's compiled `moe_gating_top_k` by CANN's operator of that name, which documents
    renorm 0 only.

    With softmax, renorm=1 divides the chosen weights by their sum (vllm-ascend's
    ops/fused_moe/experts_selector.py); with sigmoid both operators always do.
    """
    import torch_npu

    names = (
        "k_group",
        "group_count",
        "group_select_mode",
        "renorm",
        "norm_type",
        "out_flag",
        "routed_scaling_factor",
        "eps",
    )
    options = dict(zip(names, args[:8], strict=True))
    renormalized = options.pop("renorm") and options["norm_type"] == 0
    weights, experts, out = torch_npu.npu_moe_gating_top_k(
        x, k, bias=args[8] if len(args) > 8 else bias_opt, **options
    )
    if renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts, out


def install(kernel: Any) -> torch.library.Library:
    """Replace the two operators, slot mapping by ``kernel``; in effect as long as the returned
    library lives."""
    import vllm_ascend.ops.triton.compute_slot_mapping as slot_mapping

    slot_mapping._compute_slot_mapping_kernel = kernel
    compiled = torch.library.Library("_C_ascend", "FRAGMENT")
    compiled.define(
        "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int"
        " renorm, int norm_type, bool out_flag, float routed_scaling_factor, float eps, Tensor?"
        " bias_opt=None) -> (Tensor, Tensor, Tensor)"
    )
    compiled.impl("moe_gating_top_k", gating, "PrivateUse1")
    return compiled


def main(model: str, dtype: str, output: str) -> None:
    kept = install(SlotMapping())
    from vllm import LLM, SamplingParams

    draw = random.Random(7)
    prompts = [[draw.randrange(2, 512) for _ in range(length)] for length in LENGTHS]
    limits: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "gpu_memory_utilization": 0.1,
    }
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, seed=0, **limits)
    sampling = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, detokenize=False
    )
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers: list[Any] = llm.generate(inputs, sampling, use_tqdm=False)
    found = [
        {
            "prompt": prompt,
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                {token: each.logprob for token, each in row.items()}
                for row in answer.outputs[0].logprobs
            ],
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    with open(output, "w") as file:
        json.dump(found, file)
    del kept


if __name__ == "__main__":
    if sys.argv[1] == "--null":
        answers = os.dup(1)  # vllm-ascend's log is not the program's output.
        os.dup2(2, 1)
        kept = install(NullSlotMapping())
        sys.stdout.flush()
        os.dup2(answers, 1)
        del sys.argv[:2]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main(*sys.argv[1:])
