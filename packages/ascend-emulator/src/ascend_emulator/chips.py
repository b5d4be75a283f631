# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Emulated chips, from ``chips.toml``, which has one table per chip."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ascend_emulator import toml
from ascend_emulator.variables import did_you_mean

SEPARATE = ("name", "memory", "correlated", "lacks")
"""Fields that the library reads elsewhere, or not at all."""


@dataclass(frozen=True)
class Chip:
    """Properties of a chip that programs can query, and parameters of modelled times.

    Attributes:
        name: the SoC name that ``aclrtGetSocName`` answers and torch_npu knows.
        memory: device memory in bytes.
        l2: second-level cache in bytes.
        cube_cores: matrix cores ("AI cores").
        vector_cores: vector cores.
        correlated: whether results of the emulated chip were compared with published ones.
        lacks: CANN's operators that the chip does not have.
        bfloat16: whether operators support bfloat16.
        streams: maximum number of streams, including those of captured graphs.
        graph_nodes: maximum number of operators in a captured graph.
        bandwidth: of device memory, in bytes per second.
        host_bandwidth: between host and device, in bytes per second and direction.
        link_bandwidth: between two NPUs of a machine, in bytes per second and direction.
        injection_bandwidth: out of one NPU to all peers of its node, where that is the limit, or 0.
        network_bandwidth: of one NPU beyond its node.
        node: number of NPUs that links join.
        collective: seconds of the shortest collective.
        cube_flops: floating-point operations per second of the cube cores in 16-bit types.
        launch: seconds of the host between two launches.
    """

    name: str
    memory: int
    l2: int
    cube_cores: int
    vector_cores: int
    correlated: bool
    lacks: tuple[str, ...]
    bfloat16: bool
    streams: int
    graph_nodes: int
    bandwidth: float
    host_bandwidth: float
    link_bandwidth: float
    injection_bandwidth: float
    network_bandwidth: float
    node: int
    collective: float
    cube_flops: float
    launch: float

    def description(self) -> str:
        """The fields as the library reads them (csrc/core/device.cpp)."""
        fields = dataclasses.asdict(self)
        return " ".join(
            f"{name}={float(fields[name]):.17g}" for name in fields if name not in SEPARATE
        )


@cache
def chips() -> dict[str, Chip]:
    """All chips by the name that users specify, which may be an alias of the SoC name."""
    table = toml.loads((Path(__file__).parent / "chips.toml").read_text())
    common, only = table.pop("all"), table.pop("only")
    chips = {}
    for key, entry in table.items():
        row = common | entry
        hertz = row["clock_ghz"] * 1e9
        others = [
            name
            for families, names in only.items()
            if not key.startswith((*families.split(), "Ascend950"))
            for name in names
        ]
        chips[key] = Chip(
            name=row.get("soc", key),
            memory=row["memory_gib"] << 30,
            l2=row["l2_mib"] << 20,
            cube_cores=row["cube_cores"],
            vector_cores=row["vector_cores"],
            correlated=row["correlated"],
            lacks=(*table.get(row.get("lacks_as"), common)["lacks"], *row["lacks"], *others),
            bfloat16=row["bfloat16"],
            streams=row["streams"],
            graph_nodes=row["graph_nodes"],
            bandwidth=row["bandwidth_gbs"] * 1e9,
            host_bandwidth=row["host_gbs"] * 1e9,
            link_bandwidth=row["link_gbs"] * 1e9,
            injection_bandwidth=row["injection_gbs"] * 1e9,
            network_bandwidth=row["network_gbs"] * 1e9,
            node=row["node"],
            collective=row["collective_us"] * 1e-6,
            cube_flops=row["cube_cores"] * row["cube_flops_per_cycle"] * hertz,
            launch=row["launch_us"] * 1e-6,
        )
    return chips


def chip(name: str) -> Chip:
    """The chip with this name, which may also be the name that npu-smi or torch_npu prints, in any
    case: ``910B3``, ``Ascend910_9391``.

    Raises:
        ValueError: unknown chip; the message lists the supported ones.
    """
    wanted = _printed(name)
    found = (
        each for key, each in chips().items() if wanted in (_printed(key), _printed(each.name))
    )
    if (known := next(found, None)) is None:
        raise ValueError(
            f"unknown chip {name!r}{did_you_mean(name, chips())}; supported: {', '.join(chips())}"
        )
    return known


def _printed(name: str) -> str:
    return name.lower().removeprefix("ascend")


def measured(chip: Chip, report: dict[str, Any]) -> tuple[Chip, dict[str, Any]]:
    """The chip with a report's times of links and launches, and all records of its times.

    Raises:
        ValueError: the report is of another chip, of the emulator, or without times.
    """
    from ascend_emulator.verify.report import environment

    facts = environment(report)
    if facts.get("emulated"):
        raise ValueError(
            "the report is the emulator's: its times are those of a CPU; use a report of an NPU"
        )
    if facts.get("soc") != chip.name:
        raise ValueError(
            f"the report is of {facts.get('soc')}; give --soc {facts.get('soc')} or a report of"
            f" {chip.name}"
        )
    records = {
        name: record.get("facts", {})
        for section in ("timings", "collectives")
        for name, record in report["cases"].get(section, {}).items()
    }
    if not any(records.values()):
        raise ValueError(
            "the report has no times; make one with: ascend-emulator verify --only"
            " timings,collectives"
        )
    host = [
        records.get(name, {}).get("best") for name in ("copy-to-the-device", "copy-to-the-host")
    ]
    reduced = records.get("two-npus", {}).get("all_reduce", {}).values()
    link = "injection_bandwidth" if chip.injection_bandwidth else "link_bandwidth"
    times = {
        "host_bandwidth": (min((each for each in host if each), default=None), 1e9),
        link: (max((each["gb_per_second"] for each in reduced), default=None), 1e9),
        "collective": (min((each["microseconds"] for each in reduced), default=None), 1e-6),
        "launch": (records.get("launch", {}).get("eager"), 1e-6),
    }
    replaced = {name: value * unit for name, (value, unit) in times.items() if value}
    return dataclasses.replace(chip, **replaced), records
