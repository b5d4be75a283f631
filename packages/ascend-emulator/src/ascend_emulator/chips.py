"""The chips that can be emulated: data in ``chips.toml``, one table a chip."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Chip:
    """What a program can ask an NPU about itself.

    Attributes:
        name: the SoC name that ``aclrtGetSocName`` answers and torch_npu knows.
        memory: device memory in bytes.
        l2: second-level cache in bytes.
        cube_cores: matrix cores ("AI cores").
        vector_cores: vector cores.
        bandwidth: device memory bandwidth in bytes per second.
        bfloat16: whether its operators take bfloat16.
    """

    name: str
    memory: int
    l2: int
    cube_cores: int
    vector_cores: int
    bandwidth: int
    bfloat16: bool


@cache
def chips() -> dict[str, Chip]:
    """All chips by the name a user types (an alias may stand for a fuller SoC name)."""
    table = tomllib.loads((Path(__file__).parent / "chips.toml").read_text())
    return {
        key: Chip(
            row.get("soc", key),
            row["memory_gib"] << 30,
            row["l2_mib"] << 20,
            row["cube_cores"],
            row["vector_cores"],
            row["bandwidth_gbs"] * 10**9,
            row.get("bfloat16", True),
        )
        for key, row in table.items()
    }


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        ValueError: no such chip; the message lists those there are.
    """
    if name not in chips():
        raise ValueError(f"no chip {name!r}; there are {', '.join(chips())}")
    return chips()[name]
