# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Facts of the machine compared with torch_npu, and with faulty drivers that are compiled for the
tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_platform
import pytest
from ascend_platform import host

SOURCES = str(Path(ascend_platform.__file__).parents[1])


def python(script, **variables):
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_visible_devices_count_as_torch_npu_counts_them():
    script = """
import os, torch, torch_npu
from ascend_platform import host
for listed in ("", "1", "1,0", "0,1", "0, 1", "0,7", "npu0", "0,0", "0,", ",0"):
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = listed
    assert host.visible(listed, 2) == torch.npu.device_count(), listed
"""
    python(script, ASCEND_EMULATOR_NPUS="2")


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("int drvGetDevNum(unsigned *count) { *count = 8; return 0; }", "(8, '')"),
        ("int drvGetDevNum(unsigned *count) { return 87; }", "(0, 'drvGetDevNum returned 87')"),
        (
            "void abort(void); int drvGetDevNum(unsigned *count) { abort(); }",
            "(0, 'asking the driver ended with status -6')",
        ),
        ("int other;", "undefined symbol: drvGetDevNum"),
    ],
    ids=["8", "refuses", "crashes", "too old"],
)
def test_driver(driver, message, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(driver)
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-o",
        tmp_path / "libascend_hal.so",
        tmp_path / "driver.c",
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert message in python(
        "from ascend_platform import host; print(host.npu_count())", LD_LIBRARY_PATH=str(tmp_path)
    )


LISTING = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.5        35                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3391 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 92.1        37                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3391 / 65536         |
+===========================+===============+====================================================+
| 2     910_93              | OK            | 92.1        37                0    / 0             |
| 1     2                   | 0000:9D:00.0  | 0           0    / 0          3391 / 65536         |
+===========================+===============+====================================================+
"""


@pytest.mark.parametrize(
    ("listed", "nodes"),
    [
        (None, [3, 0, 1]),
        ("0,2", [3, 1]),
        ("1", [0]),
        ("2,7", [1]),
        ("1,0", None),
        ("", None),
        ("7", None),
    ],
)
def test_numa_nodes_of_visible_npus(tmp_path, monkeypatch, listed, nodes):
    for bus, node in (("0000:c1:00.0", "3"), ("0000:01:00.0", "0"), ("0000:9d:00.0", "1")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(f"{node}\n")
    if listed is None:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", listed)
    none = "npu-smi info shows no visible NPU with its PCI address"
    places, obstacle = host.npu_places(tmp_path, LISTING)
    assert (places, obstacle) == ([], none) if nodes is None else obstacle == ""
    assert [place.node for place in places] == (nodes or [])


def test_unknown_numa_nodes_have_a_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert host.npu_places(tmp_path, LISTING) == (
        [],
        "the kernel does not know the NUMA node of the NPU at 0000:C1:00.0",
    )
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "numa_node").write_text("-1\n")
    assert host.npu_places(tmp_path, LISTING) == (
        [],
        "the kernel does not know the NUMA node of the NPU at 0000:C1:00.0",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.npu_places()[1].startswith("npu-smi info failed (")
    smi = tmp_path / "npu-smi"
    smi.write_text("#!/bin/sh\nexit 3\n")
    smi.chmod(0o755)
    assert "returned non-zero exit status 3" in host.npu_places()[1]
