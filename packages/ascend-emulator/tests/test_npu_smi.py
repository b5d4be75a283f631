# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program npu-smi on the PATH of emulated processes, read as its users read it."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from ascend_emulator import build


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
            ["info", "-t", "flash"],
            "npu-smi: info -t flash is not emulated; supported: info, info -l, ",
        ),
        (["set", "-t", "reset"], "npu-smi: set -t reset is not emulated"),
        (["info", "-t", "memory", "-i", "2"], "npu-smi: there is no NPU 2; NPUs: 0 to 1"),
        (["info", "-t", "board", "-i", "1", "-c", "1"], "npu-smi: NPU 1 has no chip 1; chips: 0"),
    ],
)
def test_other_queries_are_refused_in_a_line(run, arguments, message):
    done = smi(run, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(message)


# Queries of verl (utils/device.py), vllm-ascend (worker.py, cpu_binding.py), MindFormers
# (is_support_lccl) and of others, as they read the answers.
QUERIES = {
    "verl, driver": "npu-smi info -t board -i 1 | grep 'Software Version' | cut -d: -f2",
    "verl, toolkit": (
        "grep ^version= $ASCEND_HOME_PATH/$(uname -m)-linux/ascend_toolkit_install.info"
        " | cut -d= -f2"
    ),
    "vllm-ascend, health": "npu-smi info -i 1 -t health | grep Health | cut -d: -f2",
    "vllm-ascend, bus": "npu-smi info -t board -i 1 | grep 'PCIe Bus Info' | tr -d ' ' | cut -c13-",
    "vllm-ascend, CPUs": "npu-smi info -t topo | awk '$1 == \"NPU1\" {print $NF}'",
    "lccl": "npu-smi info -t topo | sed /Legend/q | grep -c HCCS",
    "idle": "npu-smi info -t proc-mem -i 0 | grep -c 'No process in device'",
    "fault diagnosis": "npu-smi info -t common -i 0 | grep 'Aicore Usage' | cut -d: -f2",
    "power": "npu-smi info -t power -i 0 | grep 'Power' | cut -d: -f2",
    "temperature": "npu-smi info -t temp -i 0 -c 0 | grep 'Temperature' | cut -d: -f2",
    "busy": "npu-smi info -t usages -i 0 | grep 'HBM Usage' | awk '{print $5}'",
    "ids": "npu-smi info -l | grep ID | awk '{print $4}' | tr '\\n' ,",
}


def answers(run, npus, **environment):
    command = "; ".join(f"echo '{name}='$({query})" for name, query in QUERIES.items())
    done = run(
        *("run", "--npus", npus, "--memory", "1GiB", "--soc", "Ascend910B4"),
        *("--", "bash", "-c", f"set -o pipefail; {command}"),
        **environment,
    )
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value.strip() for name, _, value in lines}


def test_public_projects_read_their_answers(run):
    cpus = sorted(os.sched_getaffinity(0))
    result = answers(run, "2")
    assert str(cpus[-1]) in re.split(r"\W", result.pop("vllm-ascend, CPUs"))
    assert result == {
        "verl, driver": "25.5.0",
        "verl, toolkit": build.CANN_VERSION,
        "vllm-ascend, health": "OK",
        "vllm-ascend, bus": ":0000:02:00.0",
        "lccl": "2",
        "idle": "1",
        "fault diagnosis": "0",
        "power": "0.0",
        "temperature": "0",
        "busy": "0",
        "ids": "0,1,",
    }


def test_one_npu_answers_for_itself_only(run):
    """verl asks for NPU 1, and after a failure for the first of ASCEND_VISIBLE_DEVICES."""
    result = answers(run, "1")
    assert (result["verl, driver"], result["lccl"], result["ids"]) == ("", "0", "0,")
    done = smi(run, "info", "-t", "board", "-i", "0", npus="1")
    assert done.returncode == 0
    assert "Software Version               : 25.5.0\n" in done.stdout


def test_driver_version_is_set_by_the_option(run):
    assert answers(run, "2", ASCEND_EMULATOR_DRIVER="24.1.rc3")["verl, driver"] == "24.1.rc3"


def test_outside_of_an_emulated_process_it_says_so():
    path = shutil.which("npu-smi")  # these tests run with emulated NPUs
    assert path
    assert "ascend_emulator" in path
    environ = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    done = subprocess.run([path, "info"], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 1
    assert "no NPU is emulated" in done.stderr
