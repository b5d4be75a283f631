# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Boxes and regions of interest."""

import pytest
import torch
import torch_npu
from cann_calls import Calls

IMAGE = torch.arange(1.0, 37).view(1, 1, 6, 6)
# Expected values of op-plugin's tests of these operators.
POOLED = torch.tensor([[[[4.5, 6.5, 8.5], [16.5, 18.5, 20.5], [28.5, 30.5, 32.5]]]])
GRADIENT = torch.tensor(
    [
        [1.0786, 1.0557, 1.4942, 1.5248, 1.9226, 2.4709],
        [1.0557, 1.0332, 1.4625, 1.4924, 1.8817, 2.4183],
        [3.6872, 3.6087, 4.0380, 4.0679, 4.4572, 5.6097],
        [3.8708, 3.7884, 4.2177, 4.2476, 4.6369, 5.8324],
        [6.2575, 6.1243, 6.5536, 6.5835, 6.9729, 8.7269],
        [8.2847, 8.1084, 8.6403, 8.6774, 9.1598, 11.4575],
    ]
)
REGION = torch.tensor([[0, -2.0, -2.0, 22.0, 22.0]])


def test_regions_of_op_plugin():
    out = torch_npu.npu_roi_align(IMAGE.npu(), REGION.npu(), 0.25, 3, 3, 2, 0)
    torch.testing.assert_close(out.cpu(), POOLED)
    back = torch_npu.npu_roi_alignbk(out, REGION.npu(), [1, 1, 6, 6], 3, 3, 0.25, 2)
    torch.testing.assert_close(back.cpu()[0, 0], GRADIENT, rtol=1e-4, atol=1e-4)


def sampled(image, region, pooled, samples):
    """Bilinear samples one by one, in float64."""
    _, x0, y0, x1, y1 = region.double()
    height, width = image.shape
    bin_y, bin_x = ((y1 - y0).clamp_min(1) / pooled[0], (x1 - x0).clamp_min(1) / pooled[1])
    out = torch.zeros(pooled, dtype=torch.float64)
    for row in range(pooled[0]):
        for column in range(pooled[1]):
            for i in range(samples):
                for j in range(samples):
                    y, x = (
                        y0 + (row + (i + 0.5) / samples) * bin_y,
                        x0 + (column + (j + 0.5) / samples) * bin_x,
                    )
                    if not (-1 <= y <= height and -1 <= x <= width):
                        continue
                    y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
                    top, left = min(int(y), height - 2), min(int(x), width - 2)
                    down, right = y - top, x - left
                    part = image[top : top + 2, left : left + 2].double()
                    weights = torch.outer(
                        torch.stack([1 - down, down]), torch.stack([1 - right, right])
                    )
                    out[row, column] += (part * weights).sum() / samples**2
    return out


def test_regions_of_several_images():
    """And that the gradient is the transposed map."""
    images = torch.randn(2, 3, 7, 9)
    regions = torch.tensor(
        [[1, 0.5, 1.0, 6.0, 5.5], [0, 2.0, -3.0, 11.0, 4.0], [1, 3.0, 3.0, 3.2, 3.1]]
    )
    out = torch_npu.npu_roi_align(images.npu(), regions.npu(), 1.0, 2, 4, 3, 0).cpu()
    for i, region in enumerate(regions):
        for channel in range(3):
            expected = sampled(images[int(region[0]), channel], region, (2, 4), 3)
            torch.testing.assert_close(out[i, channel].double(), expected, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(out)
    back = torch_npu.npu_roi_alignbk(
        slope.npu(), regions.npu(), [2, 3, 7, 9], 4, 2, 1.0, 3, 0
    ).cpu()
    torch.testing.assert_close((back * images).sum(), (slope * out).sum(), rtol=1e-4, atol=1e-4)


def test_regions_are_refused():
    with pytest.raises(RuntimeError, match="dimension 1 of rois is 4; allowed: 5"):
        torch_npu.npu_roi_align(IMAGE.npu(), REGION[:, 1:].npu(), 0.25, 3, 3, 2, 0)
    with pytest.raises(RuntimeError, match="roi_end_mode is 2; allowed: 0, 1"):
        torch_npu.npu_roi_alignbk(POOLED.npu(), REGION.npu(), [1, 1, 6, 6], 3, 3, 0.25, 2, 2)


def test_intersections():
    """Expected values of op-plugin's test on Ascend950, whose operator this is."""
    calls = Calls()
    boxes = torch.tensor([[0, 0, 10, 10], [10, 10, 20, 20], [32, 32, 38, 42.0]])
    truth = torch.tensor([[0, 0, 10, 20], [0, 0, 10, 10], [10, 10, 20, 20.0]])
    expected = {
        "iof": torch.tensor([[0.5005, 0.0005, 0], [1, 0, 0], [0, 1, 0]]),
        "iou": torch.tensor([[0.5005, 0.0003, 0], [1, 0, 0], [0, 1, 0]]),
    }
    out = torch.zeros(3, 3).npu()
    for mode, values in expected.items():
        calls.compute("Iou", boxes.npu(), truth.npu(), mode, 0.01, False, out)
        torch.testing.assert_close(out.cpu().T, values, rtol=1e-3, atol=1e-4)
    assert "mode is giou; allowed: iou, iof (rule iou.arguments, " in calls.refusal(
        "Iou", boxes.npu(), truth.npu(), "giou", 0.01, False, out
    )
    assert "dimension 1 of gtboxes is 3; allowed: 4" in calls.refusal(
        "Iou", boxes.npu(), truth[:, :3].contiguous().npu(), "iou", 0.01, False, out
    )
