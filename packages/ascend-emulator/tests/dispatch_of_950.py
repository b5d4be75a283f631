# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Dispatch of tokens with shared exponents on two NPUs of Ascend950, for test_ascend950.py. Prints
each rank's rows: their codes, their exponents and the numbers of the experts."""

import json
from typing import Any

import torch
from hccl_ranks import data, play, scenario
from mc2_layer import Layer, routing

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@scenario("exponents", ranks=2, soc="Ascend950PR_9599")
def exponents(rank: int, ranks: int) -> Any:
    layer, out = Layer(rank, ranks, 4), {}
    x, ids = data(rank, (5, 1056), torch.bfloat16), routing(rank, 5, 2, 4)
    for kind, dtype in DTYPES.items():
        given = layer.dispatch(x, ids, quant_mode=4, y_dtype=dtype)
        rows = int(given[3].sum())
        codes, scales = (each.view(torch.uint8)[:rows].cpu() for each in given[:2])
        out[kind] = [codes.tolist(), scales.tolist(), given[3].tolist()]
    return out


if __name__ == "__main__":
    print(json.dumps(play("exponents")))
