# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyHcclCommunicator on two NPUs, compared with float64: on two streams, and in graph capture."""

from typing import Any

import pytest
import torch

SIZES = [3, 5]


def data(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """Input of a rank in float64, as in ranks.py."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * salt + rank)).double()


X, Y = ([data(rank, 4, 6, salt=salt) for rank in range(2)] for salt in range(2))
Z = data(0, 8, 6, salt=2) + data(1, 8, 6, salt=2)
MINE = [data(rank, SIZES[rank], 6, salt=3) for rank in range(2)]
NAN = torch.full((4, 6), torch.nan).double()
SENT = [[1, 2], [3, 1]]  # rows of each rank to each
EXPECTED: dict[str, list[Any]] = {
    "all_reduce": [X[0] + X[1]] * 2,
    "all_reduce in place": [X[0] + X[1]] * 2,
    "all_reduce max": [torch.maximum(*X)] * 2,
    "reduce": [NAN, X[0] + X[1]],
    "all_gather": [torch.cat(X)] * 2,
    "all_gatherv": [torch.cat(MINE)] * 2,
    "reduce_scatter": list((X[0] + X[1]).split(2)),
    "reduce_scatterv": list(Z.split(SIZES)),
    "broadcast": [X[1]] * 2,
    "all_to_all": [torch.cat([X[0][:1], X[1][:3]]), torch.cat([X[0][1:3], X[1][3:]])],
    "send": [NAN, X[0]],
    "both ways": Y[::-1],
}
REFUSED = {
    "dtype": (
        "ValueError: HCCL does not support complex64; supported: int8, int16, int32, float16,"
        " float32, int64, uint64, uint8, uint16, uint32, float64, bfloat16, bool"
    ),
    "another dtype": "ValueError: expected 48 elements of torch.float32; found 48 of torch.int32",
    "operation": (
        "ValueError: HCCL does not support reduction by RedOpType.BAND; supported: SUM, PRODUCT,"
        " MAX, MIN"
    ),
    "strides": "ValueError: HCCL needs contiguous tensors; [6, 4] has strides (1, 6)",
    "size": "ValueError: expected 48 elements of torch.float32; found 24 of torch.float32",
    "sizes": "ValueError: sizes [4, 5] are for 2 ranks and 9 rows; expected 2 ranks and 8 rows",
    "group": (
        "ValueError: PyHcclCommunicator needs a CPU group, such as gloo; the group's backend is"
        " hccl"
    ),
    "closed": "RuntimeError: this PyHcclCommunicator has been destroyed; create another",
    "closed group": "RuntimeError: this PyHcclCommunicator has been destroyed; create another",
}


@pytest.mark.parametrize("where", ["current", "own"])
@pytest.mark.parametrize("name", EXPECTED)
def test_collective(scenarios: dict[str, Any], name: str, where: str) -> None:
    for answer, expected in zip(scenarios["direct"], EXPECTED[name], strict=True):
        assert set(answer[where]) == set(EXPECTED)
        actual = torch.tensor(answer[where][name], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_graph_capture_and_replay(scenarios: dict[str, Any]) -> None:
    for rank, answer in enumerate(scenarios["direct"]):
        untouched, *replayed = answer["captured"]
        assert untouched == 0
        for salt, after in zip((4, 5, 6), replayed, strict=True):
            inputs = [data(each, 4, 6, salt=salt) for each in range(2)]
            expected = 2 * (inputs[0] + inputs[1]) + inputs[rank]
            torch.testing.assert_close(
                torch.tensor(after, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
            )


def test_unsupported_calls_are_refused_in_one_line(scenarios: dict[str, Any]) -> None:
    for rank, answer in enumerate(scenarios["direct"]):
        message = answer["refusals"]
        assert (
            message.pop("device")
            == f"ValueError: this PyHcclCommunicator is on npu:{rank}; a tensor is on cpu"
        )
        library = message.pop("library")
        assert library.startswith(
            "RuntimeError: HCCL's library libhccl-of-nobody.so cannot be loaded ("
        )
        assert library.endswith("; source CANN's set_env.sh, or set HCCL_SO_PATH to the file")
        hccl = message.pop("HCCL refuses")
        assert hccl.startswith("HCCLError: HcclAllReduce failed with 5 (")
        assert "\n" not in library + hccl
        assert message == REFUSED


def test_link_without_a_stream_is_destroyed(scenarios: dict[str, Any]) -> None:
    assert scenarios["streamless"] == [["no stream is left", 0]] * 2
