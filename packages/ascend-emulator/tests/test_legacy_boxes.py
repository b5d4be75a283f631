# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Legacy graph operators on boxes: intersection over union and its relatives, encoding and
decoding."""

import math

import pytest
import torch
import torch_npu
from legacy_calls import either


def boxes(count):
    """Centers and sizes, [4, count]."""
    return torch.cat([torch.rand(2, count) * 10, torch.rand(2, count) * 5 + 1])


def corners(box):
    return box[0] - box[2] / 2, box[1] - box[3] / 2, box[0] + box[2] / 2, box[1] + box[3] / 2


def overlaps(a, b):
    """Intersection, areas and the sides of what encloses both."""
    (ax, ay, ax2, ay2), (bx, by, bx2, by2) = corners(a), corners(b)
    inside = (torch.min(ax2, bx2) - torch.max(ax, bx)).clamp(0) * (
        torch.min(ay2, by2) - torch.max(ay, by)
    ).clamp(0)
    return (
        inside,
        a[2] * a[3],
        b[2] * b[3],
        torch.max(ax2, bx2) - torch.min(ax, bx),
        torch.max(ay2, by2) - torch.min(ay, by),
    )


def test_giou(agree_backward):
    def reference(a, b, *_):
        inside, first, second, width, height = overlaps(a, b)
        union, outer = first + second - inside, width * height
        return (inside / union - (outer - union) / outer)[:, None]

    agree_backward(
        lambda a, b: either("npu_giou", reference)(a, b, True, False, 0),
        boxes(9),
        boxes(9),
        ulps=64,
    )


@pytest.mark.parametrize("foreground", [0, 1])
def test_diou_and_ciou(agree, agree_backward, foreground):
    def distance_iou(a, b, *_):
        inside, first, second, width, height = overlaps(a, b)
        iou = inside / (second if foreground else first + second - inside)
        return (iou - ((a[:2] - b[:2]) ** 2).sum(0) / (width**2 + height**2))[None]

    def complete_iou(a, b, *_):
        inside, first, second, _, _ = overlaps(a, b)
        iou = inside / (second if foreground else first + second - inside)
        v = 4 / math.pi**2 * (torch.atan(b[2] / b[3]) - torch.atan(a[2] / a[3])) ** 2
        return distance_iou(a, b) - (v * v / (1 - iou + v))[None]

    a, b = boxes(9), boxes(9)
    compare = agree if foreground else agree_backward
    compare(
        lambda a, b: either("npu_diou", distance_iou)(a, b, True, False, foreground), a, b, ulps=64
    )
    agree(
        lambda a, b: either("npu_ciou", complete_iou)(a, b, True, False, foreground, True),
        a,
        b,
        ulps=64,
    )


def test_diou_of_each_box_with_each(agree):
    a, b = boxes(4), boxes(3)

    def reference(a, b, *_):
        return torch.stack(
            [torch.stack([single(a[:, i], b[:, j]) for i in range(4)]) for j in range(3)]
        )

    def single(a, b):
        inside, first, second, width, height = overlaps(a, b)
        return inside / (first + second - inside) - ((a[:2] - b[:2]) ** 2).sum(0) / (
            width**2 + height**2
        )

    agree(lambda a, b: either("npu_diou", reference)(a, b, True, True, 0), a, b, ulps=64)


def test_iou_adds_a_hundredth_to_each_side():
    """Expected values of op-plugin's test_iou.py, of an NPU."""
    ours = torch.tensor([[0, 0, 10, 10], [10, 10, 20, 20], [32, 32, 38, 42]]).half().npu()
    other_boxes = torch.tensor([[0, 0, 10, 20], [0, 10, 10, 10], [10, 10, 20, 20]]).half().npu()
    for mode, expected in (
        (1, [[0.4990, 0, 0], [0, 0, 0], [0, 0.9980, 0]]),
        (0, [[0.4985, 0, 0], [0, 0, 0], [0, 0.9961, 0]]),
    ):
        actual = torch_npu.npu_iou(ours, other_boxes, mode).cpu().float()
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_boxes_are_encoded_and_decoded():
    """Expected values of op-plugin's tests, of an NPU: the encoding is rounded to float16."""
    first = torch.tensor([[1.0, 2, 3, 4], [3, 4, 5, 6]]).npu()
    second = torch.tensor([[5.0, 6, 7, 8], [7, 8, 9, 6]]).npu()
    decoded = torch_npu.npu_bounding_box_decode(
        first, second, 0, 0, 0, 0, 1, 1, 1, 1, (10, 10), 0.1
    ).cpu()
    torch.testing.assert_close(decoded, torch.tensor([[2.5, 6.5, 9, 9], [9, 9, 9, 9]]))
    encoded = torch_npu.npu_bounding_box_encode(first, second, 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.2).cpu()
    expected = torch.tensor([[13.328125, 13.328125, 0, 0], [13.328125, 6.6640625, 0, math.nan]])
    torch.testing.assert_close(encoded, expected, equal_nan=True, rtol=0, atol=0)
