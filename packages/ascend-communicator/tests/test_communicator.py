# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Each method of the communicator on two NPUs in vLLM's groups, compared with float64."""

import inspect
from typing import Any

import pytest
import torch
from ascend_communicator.communicator import INHERITED, HCCLCommunicator
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

SIZES = [3, 5]


def data(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """Input of a rank in float64, as in ranks.py."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * salt + rank)).double()


X, Y, Z = (
    [data(0, 4, 6), data(1, 4, 6)],
    [data(0, 4, 6, salt=1), data(1, 4, 6, salt=1)],
    data(0, 8, 6, salt=2) + data(1, 8, 6, salt=2),
)
MINE = [data(rank, SIZES[rank], 6, salt=3) for rank in range(2)]
WIDE = data(0, 6, 8, salt=2) + data(1, 6, 8, salt=2)
OUTPUTS = data(0, 8, 8, salt=3) + data(1, 8, 8, salt=3)

EXPECTED: dict[str, list[Any]] = {
    "all_gather 0": [torch.cat(X)] * 2,
    "all_gather -1": [torch.cat(X, -1)] * 2,
    "reduce_scatter 0": list((X[0] + X[1]).split(2)),
    "reduce_scatter -1": list((X[0] + X[1]).split(3, -1)),
    "gather": [None, torch.cat(X)],
    "all_gatherv": [torch.cat(MINE)] * 2,
    "all_gatherv alike": [torch.cat(X)] * 2,
    "all_gatherv transposed": (
        [torch.cat([data(rank, 6, SIZES[rank], salt=3).t() for rank in range(2)])] * 2
    ),
    "all_gatherv list": [[torch.cat(MINE), torch.cat(MINE)[:, :1].trunc()]] * 2,
    "reduce_scatterv": list(Z.split(SIZES)),
    "reduce_scatterv alike": list(Z.split(4)),
    "reduce_scatterv -1": list(WIDE.split(SIZES, -1)),
    "reduce_scatterv_into_output": list(Z.split(SIZES)),
    "the same output": list(Z.split(SIZES)),
    "reduce_scatterv_into_output alike": list(Z.split(4)),
    "reduce_scatterv_into_output strided": list(Z.split(SIZES)),
    "batch_isend_irecv": MINE[::-1],
    "send and recv": [Y[1], X[0]],
    "broadcast": [X[1]] * 2,
    "all_reduce": [X[0] + X[1]] * 2,
}
TOKENS = [data(rank, SIZES[rank], 8) for rank in range(2)]
WEIGHTS = [data(rank, SIZES[rank], 2, salt=1) for rank in range(2)]
IDS = torch.cat(WEIGHTS).float().mul(100).trunc().double()
EXTRA = torch.cat([data(rank, SIZES[rank], 1, salt=2) for rank in range(2)])
EXPERTS: dict[str, list[Any]] = {
    "dispatch": [[torch.cat(TOKENS), torch.cat(WEIGHTS), IDS]] * 2,
    "dispatch extra": [[torch.cat(TOKENS), torch.cat(WEIGHTS), IDS, [EXTRA]]] * 2,
    "dispatch_router_logits": [[torch.cat(TOKENS), torch.cat(WEIGHTS)]] * 2,
    "combine": list(OUTPUTS.split(SIZES)),
    "combine_into_output": list(OUTPUTS.split(SIZES)),
    "the same output": list(OUTPUTS.split(SIZES)),
    "allocate_combine_input": [None, None],
}


def close(actual: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            close(ours, theirs)
    elif expected is None:
        assert actual is None
    else:
        torch.testing.assert_close(
            torch.tensor(actual, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", EXPECTED)
def test_collective(scenarios: dict[str, Any], name: str) -> None:
    close([answer[name] for answer in scenarios["collectives"]], EXPECTED[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_dispatch_and_combine(scenarios: dict[str, Any], name: str) -> None:
    close([answer[name] for answer in scenarios["experts"]], EXPERTS[name])


def test_vllm_groups_use_it_and_all_methods_are_compared(scenarios: dict[str, Any]) -> None:
    for rank in range(2):
        name = "ascend_communicator.communicator.HCCLCommunicator"
        assert scenarios["collectives"][rank].pop("communicator") == f"{name} on npu:{rank}"
        assert scenarios["experts"][rank].pop("manager") == "HCCLAll2AllManager"
        assert set(scenarios["collectives"][rank]) == set(EXPECTED)
        assert set(scenarios["experts"][rank]) == set(EXPERTS)


def test_unsupported_calls_are_refused_in_one_line(scenarios: dict[str, Any]) -> None:
    for message in scenarios["refusals"]:
        assert message == {
            "dimension": "ValueError: all_gatherv along dimension 1 is not supported; only along 0",
            "how many sizes": "ValueError: got 1 sizes for 2 ranks",
            "sum of sizes": "ValueError: sizes [1, 1] add up to 2 rows; the tensor has 3",
            "odd rows": "ValueError: 3 rows are not divisible by 2 ranks; give sizes",
            "no experts": "RuntimeError: group dp:0 has no all2all manager; use vLLM's group 'ep'",
            "no experts to combine": (
                "RuntimeError: group dp:0 has no all2all manager; use vLLM's group 'ep'"
            ),
        }


def test_base_class_methods_are_overridden_or_listed() -> None:
    """Detects new methods of a later vLLM, whose default in the base class may be a wrong result
    without an error."""
    methods = {
        name for name, value in vars(DeviceCommunicatorBase).items() if inspect.isfunction(value)
    }
    ours = {name for name in vars(HCCLCommunicator) if name in methods}
    assert methods - ours == set(INHERITED)
    for name in ours:
        accepted = list(inspect.signature(getattr(HCCLCommunicator, name)).parameters)
        if name != "__init__":
            assert accepted == list(
                inspect.signature(getattr(DeviceCommunicatorBase, name)).parameters
            ), name
