# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls whose limits differ between chips; run by test_limits_of_chips.py on a chip, it prints a line
of JSON: what each call computed, or the error."""

import json

import torch
import torch.nn.functional as F
import torch_npu

COLUMNS, ROWS = 200, 136


def int8_product(form):
    """Whether a matmul of int8 matrices is right, with ``x2`` as a view of ``[n, k]`` or not."""
    x, w = (torch.randint(-9, 9, (n, COLUMNS), dtype=torch.int8) for n in (8, ROWS))
    scales = torch_npu.npu_trans_quant_param(torch.full((ROWS,), 0.01).npu())
    left, right = x.npu(), w.npu().t()
    if form == "contiguous":
        right = right.contiguous()
    if form == "left":
        left = x.t().contiguous().npu().t()
    result = torch_npu.npu_quant_matmul(left, right, scales, output_dtype=torch.float16)
    return bool(((x.double() @ w.double().t() * 0.01) - result.cpu()).abs().max() < 0.2)


def chunk_rule(dtype, width):
    """Dtype of the last states, and whether they and the output are those of the recurrence."""
    query, key = (F.normalize(torch.rand(40, 2, width).bfloat16(), dim=-1) for _ in range(2))
    value, beta, g = torch.rand(40, 4, width), torch.rand(40, 4), -torch.rand(40, 4)
    value, beta = value.bfloat16(), beta.bfloat16()
    state = torch.rand(2, 4, width, width).to(dtype)
    out, final = torch_npu.npu_chunk_gated_delta_rule(
        *(x.npu() for x in (query, key, value)),
        beta=beta.npu(),
        initial_state=state.npu(),
        actual_seq_lengths=torch.tensor([30, 10], dtype=torch.int32).npu(),
        scale=0.1,
        g=g.npu(),
    )
    error = 0.0
    for request, tokens in enumerate((range(30), range(30, 40))):
        now = state[request].double()
        for i in tokens:
            k, q = (x[i].double().repeat_interleave(2, 0)[:, None] for x in (key, query))
            now = now * g[i].double().exp().view(-1, 1, 1)
            change = (value[i].double() - (now * k).sum(-1)) * beta[i, :, None].double()
            now = now + change[..., None] * k
            wanted = (now * q).sum(-1) * 0.1
            error = max(error, float((out[i].cpu() - wanted).abs().max()))
        error = max(error, float((final[request].cpu() - now).abs().max()) / 8)
    return str(final.dtype), error < 0.01


def gated(mode):
    x = torch.randn(4, 1024).half().npu()
    return list(torch_npu.npu_dequant_swiglu_quant(x, quant_mode=1, swiglu_mode=mode)[0].shape)


def hyper_connections(part):
    x, matrix = torch.randn(2, 4, 64).half().npu(), torch.randn(2, 4, 4).npu()
    if part == "Sinkhorn":
        return list(torch_npu.npu_mhc_sinkhorn(matrix)[0].shape)
    if part == "Post":
        y = torch_npu.npu_mhc_post(x, matrix, x[:, 0].contiguous(), matrix[:, 0].contiguous())
        return list(y.shape)
    weights = torch.randn(24, 256).npu()
    outputs = torch_npu.npu_mhc_pre(
        x, weights, matrix[0, 0, :3].contiguous(), weights[:, 0].contiguous()
    )
    return [list(output.shape) for output in outputs[:3]]


CALLS = {
    **{f"int8 {form}": (int8_product, form) for form in ("view", "contiguous", "left")},
    **{f"Mhc{part}": (hyper_connections, part) for part in ("Pre", "Post", "Sinkhorn")},
    **{f"swiglu {mode}": (gated, mode) for mode in (0, 1)},
    **{
        f"chunk {dtype} {width}": (chunk_rule, getattr(torch, dtype), width)
        for dtype in ("bfloat16", "float32")
        for width in (64, 128)
    },
}


def main():
    torch_npu.npu.set_compile_mode(jit_compile=False)
    result = {}
    for name, (call, *arguments) in CALLS.items():
        try:
            result[name] = call(*arguments)
        except RuntimeError as error:
            result[name] = " ".join(str(error).split("[ascend-emulator] ")[-1].split())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
