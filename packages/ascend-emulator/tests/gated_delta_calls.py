# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls of the gated delta rule that its documentation does not allow; run by
test_gated_delta_rule.py, it prints their errors.

Values are read in the computation, whose error ends all further work of a process: each such call
is made in a fork.
"""

import os
import sys

import torch
import torch.nn.functional as F
import torch_npu

WIDTH, KEY_HEADS, HEADS = 128, 2, 4


def inputs(tokens, width=WIDTH, blocks=0, heads=HEADS, key_heads=KEY_HEADS):
    """Query, key, value, state, beta and g."""
    query, key = (
        F.normalize(torch.randn(tokens, key_heads, width), dim=-1).bfloat16() for _ in range(2)
    )
    value, state = (
        torch.randn(tokens, heads, width).bfloat16(),
        torch.randn(blocks or tokens, heads, width, width).bfloat16(),
    )
    return (
        query,
        key,
        value,
        state,
        torch.rand(tokens, heads).bfloat16(),
        -torch.rand(tokens, heads),
    )


def int32(*values):
    return torch.tensor(values, dtype=torch.int32).npu()


def named(tokens, **settings):
    return dict(
        zip(
            ("query", "key", "value", "state", "beta", "g"), inputs(tokens, **settings), strict=True
        )
    )


def recurrent(tokens=2, lengths=(2,), blocks=(0, 1), accepted=(), settings=None, **changed):
    on_npu = {name: x.npu() for name, x in (named(tokens, **(settings or {})) | changed).items()}
    accepted = int32(*accepted) if accepted else None
    torch_npu.npu_recurrent_gated_delta_rule(
        **on_npu,
        scale=1.0,
        actual_seq_lengths=int32(*lengths),
        ssm_state_indices=int32(*blocks),
        num_accepted_tokens=accepted,
    )
    torch.npu.synchronize()


def chunk(tokens=3, lengths=(3,), settings=None, **changed):
    values = named(tokens, blocks=len(lengths), **(settings or {})) | changed
    on_npu = {name: x.npu() for name, x in values.items()}
    on_npu["initial_state"] = on_npu.pop("state")
    torch_npu.npu_chunk_gated_delta_rule(**on_npu, scale=1.0, actual_seq_lengths=int32(*lengths))
    torch.npu.synchronize()


OF_VALUES = {
    "actual_seq_lengths is 9; allowed: 1 to 8": lambda: recurrent(9, (9,), range(9)),
    "actual_seq_lengths is 0; allowed: 1 to 8": lambda: recurrent(2, (2, 0)),
    "actual_seq_lengths is -14; allowed: 1 to 8": lambda: recurrent(
        2, (8, 8, -14), accepted=(8, 1, 1)
    ),
    "actual_seq_lengths add up to 1 and there are 2 tokens": lambda: recurrent(2, (1,)),
    "ssm_state_indices has 2; state has 2 blocks": lambda: recurrent(blocks=(0, 2)),
    "ssm_state_indices has -1; state has 2 blocks": lambda: recurrent(blocks=(0, -1)),
    "num_accepted_tokens has 3; allowed: 1 to 2": lambda: recurrent(accepted=(3,)),
    "g has 0.5; allowed: -inf to 0": lambda: chunk(g=torch.full((3, HEADS), 0.5)),
    "key has -1.5; allowed: -1 to 1": lambda: chunk(
        key=torch.full((3, KEY_HEADS, WIDTH), -1.5).bfloat16()
    ),
    "beta has 1.5; allowed: 0 to 1": lambda: chunk(beta=torch.full((3, HEADS), 1.5).bfloat16()),
    "actual_seq_lengths add up to 2 and there are 3 tokens": lambda: chunk(lengths=(2,)),
}


def main():
    for number, call in enumerate(OF_VALUES.values()):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        print(f"CASE {number}", file=sys.stderr, flush=True)
        try:
            call()
            print("accepted", file=sys.stderr)
        except RuntimeError as error:
            print(error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
