# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The emulator relative to plain CPU torch: matmuls, norms and attention of a 0.6B model's sizes,
and 8 experts of a width of 768.

    tools/bench emulator [--threads 2] [--repeat 15]

"decode" is attention of one token of each request over 4,096 cached ones, in pages on the NPU, by
npu_fused_infer_attention_score; "experts" are matmuls of some rows with each expert's weight, by
npu_grouped_matmul. On the CPU they are PyTorch's scaled_dot_product_attention, and a matmul for
each expert.

Per case the median time of a call on the emulated NPU, where it ends with a synchronization, over
that of the same call on the CPU; the two sides take turns. At last what launching an operator costs
the host, with and without the null mode, at each level of torch_npu's task queue.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

LAUNCHES = """
import statistics, time, torch, torch_npu
x, count = torch.ones(16, 16, device="npu"), 2000
rounds = []
for _ in range(12):
    torch.npu.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        y = x + x
    submitted = time.perf_counter() - start
    torch.npu.synchronize()
    rounds.append((submitted, time.perf_counter() - start))
print(*(statistics.median(side) / count * 1e6 for side in zip(*rounds[2:])))
"""


def median(call: Callable[[], object], repeat: int) -> float:
    """Seconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(arguments: argparse.Namespace) -> None:
    """In a process with an emulated NPU."""
    import torch
    import torch_npu
    from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    def cases(tokens: int) -> dict:
        hidden, middle, heads, key_heads, size = 1024, 3072, 16, 8, 128
        make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)  # noqa: E731
        x, q = make(tokens, hidden), make(1, heads, tokens, size)
        k, v = make(1, key_heads, tokens, size), make(1, key_heads, tokens, size)
        return {
            "matmul qkv": (linear, (x, make((heads + 2 * key_heads) * size, hidden))),
            "matmul up": (linear, (x, make(2 * middle, hidden))),
            "matmul down": (linear, (make(tokens, middle), make(hidden, middle))),
            "rms_norm": (lambda x, w: rms_norm(x, (hidden,), w, 1e-6), (x, make(hidden))),
            "silu": (silu, (make(tokens, middle),)),
            "attention": (
                lambda q, k, v: scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                ),
                (q, k, v),
            ),
        }

    def compare(name: str, tokens: int, on_cpu: Callable, on_npu: Callable) -> None:
        def ended() -> object:
            result = on_npu()
            torch.npu.synchronize()
            return result

        with torch.inference_mode():
            torch.testing.assert_close(ended().cpu().float(), on_cpu().float(), atol=0.1, rtol=0.1)
            rounds = [
                (median(on_cpu, arguments.repeat), median(ended, arguments.repeat))
                for _ in range(3)
            ]
        cpu, npu = (statistics.median(side) for side in zip(*rounds, strict=True))
        print(
            f"{name:<14}{tokens:>7}{cpu * 1e6:>10.0f}{npu * 1e6:>13.0f}{npu / cpu:>7.2f}",
            flush=True,
        )

    def decode(requests: int) -> tuple[Callable, Callable]:
        heads, key_heads, size, length, page = 16, 8, 128, 4096, 128
        q = torch.randn(requests, heads, 1, size, dtype=torch.bfloat16)
        k, v = torch.randn(2, requests, key_heads, length, size, dtype=torch.bfloat16)
        pages = [each.transpose(1, 2).reshape(-1, page, key_heads * size).npu() for each in (k, v)]
        table = torch.arange(requests * length // page, dtype=torch.int32).view(requests, -1).npu()
        query, lengths, ends = (
            q.view(requests, heads, size).npu(),
            [length] * requests,
            list(range(1, requests + 1)),
        )

        def on_npu() -> torch.Tensor:
            attended = torch_npu.npu_fused_infer_attention_score(
                query,
                *pages,
                block_table=table,
                block_size=page,
                input_layout="TND",
                num_heads=heads,
                num_key_value_heads=key_heads,
                scale=size**-0.5,
                actual_seq_lengths=ends,
                actual_seq_lengths_kv=lengths,
            )[0]
            return attended.view(q.shape)

        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), on_npu

    def experts(rows: int) -> tuple[Callable, Callable]:
        count, hidden, middle = 8, 1024, 768
        x = torch.randn(count * rows, hidden, dtype=torch.bfloat16)
        weights = torch.randn(count, hidden, 2 * middle, dtype=torch.bfloat16) * hidden**-0.5
        on_device, ends = (x.npu(), weights.npu()), torch.arange(rows, count * rows + 1, rows).npu()

        def on_npu() -> torch.Tensor:
            inputs, weight = on_device
            return torch_npu.npu_grouped_matmul(
                [inputs], [weight], group_list=ends, split_item=3, group_type=0
            )[0]

        return (
            lambda: torch.cat(
                [part @ weight for part, weight in zip(x.split(rows), weights, strict=True)]
            ),
            on_npu,
        )

    print(f"{'case':<14}{'tokens':>7}{'cpu us':>10}{'emulated us':>13}{'ratio':>7}")
    for tokens in (1, 8, 128, 512):
        for name, (call, values) in cases(tokens).items():
            device = [value.npu() for value in values]
            compare(name, tokens, partial(call, *values), partial(call, *device))
    for tokens in (1, 8):
        compare("decode", tokens, *decode(tokens))
    for tokens in (1, 2, 4, 8):
        compare("experts", tokens, *experts(tokens))


def launches() -> None:
    """Microseconds per small addition, of 2,000 in a row: until submission, and until completion;
    medians of ten."""
    for label, options in {"computed": [], "null mode": ["--null"]}.items():
        for level in ("0", "1", "2"):
            command = ["ascend-emulator", "run", *options, "--", sys.executable, "-c", LAUNCHES]
            variables = {**os.environ, "TASK_QUEUE_ENABLE": level}
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=variables
            ).stdout.split()
            times = (
                f"{float(output[0]):.1f} us a launch on the host, {float(output[1]):.1f} us up to"
                " its end"
            )
            print(f"{label}, TASK_QUEUE_ENABLE={level}: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools/bench emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments)
        return
    inside = [
        "ascend-emulator",
        "run",
        "--",
        sys.executable,
        __file__,
        "--inside",
        f"--threads={arguments.threads}",
    ]
    subprocess.run([*inside, f"--repeat={arguments.repeat}"], check=True)
    launches()


if __name__ == "__main__":
    main()
