# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Published figures of chips, by the names that machines print."""

from ascend_cli import figures
from ascend_platform import chips


def test_figures_go_by_the_beginning_of_the_name() -> None:
    assert figures.figures_of("Ascend910_9391") is figures.FIGURES["Ascend910_93"]
    assert figures.figures_of("Ascend910B2C") is figures.FIGURES["Ascend910B2"]
    assert figures.figures_of("Ascend910A") is None
    assert all(chips.family_of(name) is not chips.UNKNOWN for name in figures.FIGURES)
