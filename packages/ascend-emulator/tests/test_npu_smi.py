# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program npu-smi on the PATH of emulated processes, read as its users read it."""

import re
import shutil
import subprocess
import sys

import pytest


def smi(run, *arguments, npus="2"):
    return run(
        "run",
        "--npus",
        npus,
        "--memory",
        "1GiB",
        "--soc",
        "Ascend910B4",
        "--",
        "npu-smi",
        *arguments,
    )


def test_info_has_a_row_for_each_npu(run):
    done = smi(run, "info")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.findall(r"^\| (\d) +(910B4) +\| OK ", done.stdout, re.MULTILINE) == [
        ("0", "910B4"),
        ("1", "910B4"),
    ]
    assert re.findall(r"/ (\d+) +\|$", done.stdout, re.MULTILINE) == ["0", "1024", "0", "1024"]


def test_list_is_counted_as_deepspeed_and_vllm_ascend_count(run):
    """DeepSpeed searches for `Total Count`, vllm-ascend's CPU binding splits the mapping
    at blanks."""
    listing = smi(run, "info", "-l").stdout
    assert int(re.search(r"Total Count\s*:\s*(\d+)", listing)[1]) == 2
    assert re.findall(r"NPU ID\s*: (\d)", listing) == ["0", "1"]
    rows = [line.split() for line in smi(run, "info", "-m").stdout.strip().splitlines()[1:]]
    assert rows == [["0", "0", "0", "Ascend", "910B4"], ["1", "0", "1", "Ascend", "910B4"]]


def test_topics(run):
    assert re.search(
        r"HBM Capacity\(MB\)\s*: 1024\n", smi(run, "info", "-t", "memory", "-i", "1").stdout
    )
    assert re.search(
        r"Aicore Usage Rate\(%\)\s*: 0\n",
        smi(run, "info", "-t", "usages", "-i", "0", "-c", "0").stdout,
    )
    assert re.search(
        r"Software Version\s*: \S+\n", smi(run, "info", "-t", "board", "-i", "0").stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["info", "-t", "topo"],
            "npu-smi: info -t topo is not emulated; supported: info, info -l, ",
        ),
        (["set", "-t", "reset"], "npu-smi: set -t reset is not emulated"),
        (["info", "-t", "memory", "-i", "2"], "npu-smi: there is no NPU 2; NPUs: 0 to 1"),
    ],
)
def test_other_queries_are_refused_in_a_line(run, arguments, message):
    done = smi(run, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(message)


def test_outside_of_an_emulated_process_it_says_so():
    path = shutil.which("npu-smi")  # these tests run with emulated NPUs
    assert path
    assert "ascend_emulator" in path
    environ = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    done = subprocess.run([path, "info"], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 1
    assert "no NPU is emulated" in done.stderr
