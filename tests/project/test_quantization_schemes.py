# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The table of schemes in docs/quantization.md: every registered scheme with its experts and its
chips."""

import re

from ascend_platform import chips
from ascend_platform.config.quantization import DESCRIPTION, METHODS, MODELSLIM, SCHEME_BITS
from ascend_quantization import common
from ascend_quantization.schemes import FLOAT, SCHEMES
from harness import checkout

PAGE = (checkout.ROOT / "docs" / "quantization.md").read_text()
FAMILIES = {"A2": "Atlas A2", "A3": "Atlas A3", "950": "Ascend 950", "310P": "Ascend 310P"}
FLOATS = "ascend_quantization.schemes.floats"


def rows() -> dict[str, list[str]]:
    """Cells of each row by the scheme's name."""
    table = PAGE.partition("| ModelSlim name |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", table, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def test_every_registered_scheme_has_a_row_and_bits() -> None:
    assert {*rows()} == {*SCHEMES, FLOAT}
    # The layout planner has those of integers.
    floats = {name for name, scheme in SCHEMES.items() if type(scheme).__module__ == FLOATS}
    assert {*SCHEME_BITS} == {*SCHEMES} - floats
    assert floats


def test_platform_and_wheel_have_the_same_names() -> None:
    values = (value for name, value in vars(common).items() if name.isupper())
    of_wheel = {value for value in values if isinstance(value, str)}
    assert of_wheel == {*METHODS, DESCRIPTION} - {"compressed-tensors"}
    assert MODELSLIM == common.NAME


def test_rows_have_the_experts_and_chips_of_the_code() -> None:
    families = {family.name: family for family in chips.FAMILIES}
    for name, scheme in SCHEMES.items():
        _, _, _, experts, listed, _ = rows()[name]
        assert experts == ("yes" if scheme.experts else "no"), name
        taking = [
            short for short, family in FAMILIES.items() if name in families[family].quantization
        ]
        assert listed.split(", ") == taking, name


def test_no_supported_scheme_is_listed_as_refused() -> None:
    refused = re.findall(r"`(\w+)`", PAGE.partition("and on all chips ")[2].partition(";")[0])
    assert refused
    assert not {*refused} & {*SCHEMES}
