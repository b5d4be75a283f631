# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Published figures of Ascend chips, for estimates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChipFigures:
    """Published figures of one NPU, for estimates.

    Attributes:
        name: of the chip; a longer name that begins with it is the same chip.
        memory_gib: device memory in GiB.
        bandwidth_gbs: bandwidth of device memory in GB/s.
        tflops: of 16-bit matmuls; 8-bit matmuls are twice as fast ("140 TOPS INT8" of 310P).
        node: NPUs joined by the links below.
        network_gbs: GB/s of one NPU beyond the node, in one direction.
        collective_us: least time of a collective without data, in microseconds.
        link_gbs: GB/s to each other NPU of the node, in one direction; 0 where ``injection_gbs`` is
            the limit.
        injection_gbs: GB/s out of one NPU in one direction, to any number of peers of the node.
    """

    name: str
    memory_gib: float
    bandwidth_gbs: float
    tflops: float
    node: int
    network_gbs: float
    collective_us: float
    link_gbs: float = 0.0
    injection_gbs: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second of device memory."""
        return self.bandwidth_gbs * 1e9

    @property
    def cube_flops(self) -> float:
        """Operations a second of 16-bit matmuls."""
        return self.tflops * 1e12

    def send_gbs(self, ranks: int) -> float:
        """GB/s that an NPU sends to ``ranks`` - 1 peers at once."""
        if ranks > self.node:
            return self.network_gbs
        return self.injection_gbs or self.link_gbs * (ranks - 1)


def _atlas_a2(name: str, memory_gib: float, bandwidth_gbs: float, tflops: float) -> ChipFigures:
    return ChipFigures(
        name,
        memory_gib,
        bandwidth_gbs,
        tflops,
        node=8,
        network_gbs=25,
        collective_us=20,
        link_gbs=28,
    )


def _ascend_950(name: str, memory_gib: float, bandwidth_gbs: float) -> ChipFigures:
    return ChipFigures(
        name,
        memory_gib,
        bandwidth_gbs,
        500,
        node=8,
        network_gbs=25,
        collective_us=20,
        injection_gbs=1000,
    )


# Sources:
# - memory, bandwidth, cores, host link: Huawei's product pages for Atlas 800T A2, Atlas 800T A3 and
# Atlas 300I Duo.
# Of Ascend910B4-1 there is none: its 64 GiB and 20 cores are what npu-smi prints in public reports
# (vllm-project/vllm-ascend, issues 9428 and 11736), its bandwidth is that of the other chips of 64 GiB.
# - tflops: cube cores x 8192 operations a cycle x 1.8 GHz (1.08 GHz on 310P, for which 70 TFLOPS
# are published).
# - link_gbs: HCCS of an Atlas 800T A2, 392 GB/s over seven links in both directions.
# - injection_gbs: on A3 half of the 392 GB/s that "Serving Large Language Models on Huawei
# CloudMatrix384" (arXiv 2506.12708) gives for a package of two NPUs; on 310P half of a PCIe 4.0 x16
# slot that two NPUs share.
# Of Ascend950PR and Ascend950DT memory, bandwidth, 1 PFLOPS of FP8 and 2 TB/s of links are what Huawei
# announced in 2025; tflops is half of that and injection_gbs one direction. The others are those of A2.
# - network_gbs: 200 Gbit/s RoCE.
# - collective_us: on A3 of a public profile (docs/modelled-times.md); otherwise an order of magnitude,
# of HCCL's AIV mode and, on 310P, over PCIe.
FIGURES = {
    figures.name: figures
    for figures in (
        _atlas_a2("Ascend910B1", 64, 1600, 354),
        _atlas_a2("Ascend910B2", 64, 1600, 354),
        _atlas_a2("Ascend910B3", 64, 1600, 295),
        _atlas_a2("Ascend910B4", 32, 800, 295),
        _atlas_a2("Ascend910B4-1", 64, 1600, 295),
        ChipFigures(
            "Ascend910_93",
            64,
            1600,
            354,
            node=16,
            network_gbs=25,
            collective_us=6,
            injection_gbs=196,
        ),
        _ascend_950("Ascend950PR", 128, 1600),
        _ascend_950("Ascend950DT", 144, 4000),
        ChipFigures(
            "Ascend310P3", 48, 204, 70, node=8, network_gbs=3, collective_us=100, injection_gbs=16
        ),
    )
}
"""By chip name."""
PROFILED = "Ascend910_93"
"""The chip of the public profile on which laws of modelled times are fitted."""
ANNOUNCED = ("Ascend950PR", "Ascend950DT")
"""Chips without a published time of any model."""


ALIASES = {"a3": "910_93", "910c": "910_93", "310p": "310p3", "950": "950pr"}
"""Other names of a chip, in lower case and without "Ascend"."""


def figures_of(chip: str) -> ChipFigures | None:
    """The figures of a chip by its name, or None.

    The name is that of torch_npu (``Ascend910B3``), that of npu-smi (``910B3``), in any case, or
    one of ``ALIASES``. If one chip's name begins with another's (Ascend910B4 and
    Ascend910B4-1), the longer name decides.
    """
    name = chip.lower().removeprefix("ascend")
    name = f"ascend{ALIASES.get(name, name)}"
    found = [each for each in FIGURES.values() if name.startswith(each.name.lower())]
    return max(found, key=lambda each: len(each.name), default=None)
