# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streaming of weights through pinned memory."""

from collections.abc import Iterator

import pytest
import torch
from ascend_model_loader.stream import PREFETCHED_TENSORS, pin_weights

SIZES = [0, 1, 7, 4096, 300_000, *range(1, 2 * PREFETCHED_TENSORS)]


def weights(fails_at: int = len(SIZES)) -> Iterator[tuple[str, torch.Tensor]]:
    for number, size in enumerate(SIZES):
        if number == fails_at:
            raise OSError("the disk")
        yield f"w{number}", torch.arange(size, dtype=torch.int32) + number


def test_weights_are_pinned_in_order_and_can_be_kept() -> None:
    kept = list(pin_weights(weights(), 0))
    assert [name for name, _ in kept] == [f"w{number}" for number in range(len(SIZES))]
    for (_, tensor), (_, wanted) in zip(kept, weights(), strict=True):
        assert tensor.is_pinned() or not tensor.numel()
        assert torch.equal(tensor, wanted)
        assert torch.equal(tensor.npu().cpu(), wanted)


@pytest.mark.parametrize("place", [0, 2, 2 * PREFETCHED_TENSORS])
def test_error_in_the_pinning_thread_is_raised(place: int) -> None:
    came = []
    with pytest.raises(OSError, match="the disk"):
        came.extend(pin_weights(weights(place), 0))
    assert len(came) in (0, place)  # list.extend keeps the items before the error.


def test_closing_the_iterator_stops_reading() -> None:
    read = weights()
    iterator = pin_weights(read, 0)
    next(iterator)
    iterator.close()
    left = len(list(read))
    assert len(SIZES) - left == 1 + PREFETCHED_TENSORS
