"""What is told of the machine, against torch_npu, and against drivers that misbehave, compiled for the test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_platform
import pytest

SOURCES = str(Path(ascend_platform.__file__).parents[1])


def python(script, **variables):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]), **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_visible_devices_count_as_torch_npu_counts_them():
    script = """
import os, torch, torch_npu
from ascend_platform import machine
for listed in ("", "1", "1,0", "0,1", "0, 1", "0,7", "npu0", "0,0", "0,", ",0"):
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = listed
    assert machine.visible(listed, 2) == torch.npu.device_count(), listed
"""
    python(script, ASCEND_EMULATOR_NPUS="2")


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("int drvGetDevNum(unsigned *count) { *count = 8; return 0; }", "(8, '')"),
        ("int drvGetDevNum(unsigned *count) { return 87; }", "(0, 'drvGetDevNum returned 87')"),
        ("void abort(void); int drvGetDevNum(unsigned *count) { abort(); }", "(0, 'asking the driver ended with status -6')"),
        ("int other;", "undefined symbol: drvGetDevNum"),
    ],
    ids=["8", "refuses", "crashes", "too old"],
)
def test_driver(driver, said, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(driver)
    command = [compiler, "-shared", "-fPIC", "-o", tmp_path / "libascend_hal.so", tmp_path / "driver.c"]
    subprocess.run(command, check=True, capture_output=True)
    assert said in python("from ascend_platform import machine; print(machine.npu_count())", LD_LIBRARY_PATH=str(tmp_path))
