# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The emulator's check of `vllm-ascend doctor`."""

from pathlib import Path

import pytest
from ascend_emulator import doctor


def test_real_npus_beside_emulated_ones_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_EMULATOR_NPUS", "1")
    (tmp_path / "davinci_manager").touch()
    assert list(doctor.check(devices=tmp_path)) == []
    (tmp_path / "davinci0").touch()
    ((title, state, text, _),) = doctor.check(devices=tmp_path)
    assert (title, state) == ("emulated NPUs", "warn")
    assert f"this machine has 1 NPUs ({tmp_path}/davinci0)" in text
    monkeypatch.delenv("ASCEND_EMULATOR_NPUS")
    assert list(doctor.check(devices=tmp_path)) == []
