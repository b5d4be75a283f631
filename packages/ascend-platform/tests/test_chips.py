"""The table of chip families, by the chips' names that torch_npu knows."""

import pytest
from ascend_platform import chips, extension


@pytest.mark.parametrize(
    ("chip", "family", "streams"),
    [
        ("Ascend910B1", "Atlas A2", 1984),
        ("Ascend910B2C", "Atlas A2", 1984),
        ("Ascend910B4-1", "Atlas A2", 1984),
        ("Ascend910_9391", "Atlas A3", 1984),
        ("Ascend310P3", "Ascend 310P", 1024),
        ("Ascend910ProB", "Ascend 910A", 1984),
        ("Ascend910B", "Ascend 910A", 1984),  # of the first generation
        ("Ascend950PR_9599", "Ascend 950", 1984),
        ("Ascend310B1", "unknown", 1984),
        ("", "unknown", 1984),
    ],
)
def test_family_and_streams(chip: str, family: str, streams: int) -> None:
    found = chips.family_of(chip)
    assert (found.name, found.streams) == (family, streams)
    assert extension.Chip(chip, 0, 0, 0).family is found


def test_operators_that_only_atlas_a2_and_a3_have() -> None:
    served = {"Atlas A2", "Atlas A3"}
    for capability in ("quantization", "top_k_top_p", "moe_routing", "mc2"):
        assert {family.name for family in chips.FAMILIES if getattr(family, capability)} == served


def test_figures_go_by_the_beginning_of_the_name() -> None:
    assert chips.figures_of("Ascend910_9391") is chips.FIGURES["Ascend910_93"]
    assert chips.figures_of("Ascend910B2C") is chips.FIGURES["Ascend910B2"]
    assert chips.figures_of("Ascend910A") is None
    assert all(chips.family_of(name) is not chips.UNKNOWN for name in chips.FIGURES)
