# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The pytest plugin: nothing is emulated unless the command line or the configuration
asks for it."""

import os
import re
import subprocess
import sys
from threading import Timer

import pytest

LOADED = "'libascend_emulator.so' in open('/proc/self/maps').read()"


@pytest.fixture
def suite(tmp_path):
    """``suite(test, *arguments, ini=..., **environment)``: pytest's end of a suite of one test, in
    a process of its own.

    With ``started`` the process itself.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ASCEND_EMULATOR_") or name.endswith("TRACE")
    }
    environment.pop("LD_LIBRARY_PATH", None)

    def start(body, *arguments, ini="", started=False, **options):
        (tmp_path / "test_one.py").write_text(f"def test_one():\n    {body}\n")
        (tmp_path / "conftest.py").write_text(f"import os\nEARLY = {LOADED}\n")
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *arguments,
            str(tmp_path),
        ]
        if started:
            pipe = subprocess.PIPE
            return subprocess.Popen(
                command,
                stdout=pipe,
                stderr=pipe,
                text=True,
                cwd=tmp_path,
                env=environment | options,
            )
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=environment | options,
            check=False,
        )

    return start


def passed(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_by_default(suite):
    assert "emulated" not in passed(
        suite(f"import os; assert not {LOADED} and 'ASCEND_EMULATOR_NPUS' not in os.environ")
    )


def test_configuration_file_asks_for_it(suite):
    ini = "ascend_emulator_npus = 2\nascend_emulator_memory = 1GiB"
    assert "2 emulated NPUs (Ascend910B1, 1 GiB of its 64 GiB)" in passed(
        suite(f"assert {LOADED}", ini=ini)
    )


def test_command_line_wins_over_the_configuration_file(suite):
    assert "emulated" not in passed(
        suite(f"assert not {LOADED}", "--npus", "0", ini="ascend_emulator_npus = 2")
    )


def test_command_line_asks_for_it_before_any_conftest(suite):
    seen = "(conftest.EARLY, torch.npu.device_count(), torch.npu.get_device_name())"
    body = f"import conftest, torch; assert {seen} == (True, 3, 'Ascend910B2')"
    line = passed(suite(body, "--npus", "3", "--soc", "Ascend910B2", "--npu-memory", "512MiB"))
    assert "3 emulated NPUs (Ascend910B2, 0.5 GiB of its 64 GiB)" in line


def test_a_number_that_is_none_is_answered_in_a_line(suite):
    done = suite("pass", ini="ascend_emulator_npus = one")
    assert done.returncode == 4
    assert "ascend_emulator_npus is 'one'; supported: a number of NPUs, 0 for none" in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_unknown_chip_is_answered_in_a_line(suite):
    done = suite("pass", "--npus", "1", "--soc", "Ascend")
    assert done.returncode != 0
    assert "unknown chip 'Ascend'; did you mean" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--npus", "99"], {}, "99 NPUs requested; supported: 1 to "),
        (["--npus", "1"], {"ASCEND_EMULATOR_WITHOUT": "aclnnAddd"}, "did you mean aclnnAdd?"),
        (["--npus", "1"], {"ASCEND_EMULATOR_FAULTS": "sstream@1=hang"}, "did you mean stream?"),
        (["--npus", "1"], {"ASCEND_EMULATOR_LEAK": "1"}, "did you mean ASCEND_EMULATOR_LEAKS?"),
    ],
)
def test_wrong_names_and_numbers_are_answered(suite, arguments, environment, message):
    done = suite("pass", *arguments, **environment)
    assert done.returncode == 4
    (line,) = [each for each in done.stderr.splitlines() if each]
    assert line.startswith("ERROR: ")
    assert message in line


def test_strict_tests_have_poisoned_memory_and_an_adversary(suite):
    names = ("POISON", "LEAKS", "RACES", "ADVERSARY")
    body = (
        f"import os; assert [os.environ['ASCEND_EMULATOR_' + name] for name in {names}] =="
        " ['1'] * 4"
    )
    passed(suite(body, "--npus", "1", "--npu-strict"))


def test_compiling_reports_progress_before_it_ends(suite, tmp_path):
    """pytest captures nothing of it. The compiler waits until its line was read."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo waiting && exit\nwhile [ ! -e {tmp_path}/read ];'
        " do sleep 0.1; done\nexit 1\n"
    )
    compiler.chmod(0o755)
    with suite(
        "pass",
        "--npus",
        "1",
        started=True,
        CXX=str(compiler),
        ASCEND_EMULATOR_CACHE=str(tmp_path / "cache"),
    ) as process:
        stop = Timer(60, (tmp_path / "read").touch)
        stop.start()
        lines = iter(process.stderr.readline, "")
        line = next((line for line in lines if " compilers, about " in line), "")
        early = stop.is_alive()
        stop.cancel()
        (tmp_path / "read").touch()
        rest = process.communicate(timeout=60)
    assert early
    assert re.fullmatch(
        r"ascend-emulator:   8 parts with \d+ compilers, about \d+ s of idle processors\n", line
    )
    assert "failed" in rest[1]
    assert "Traceback" not in rest[1]


def test_torch_npu_that_is_loaded_already_is_answered_in_a_line(suite, tmp_path):
    loaded = "sys.modules['torch_npu'] = util.module_from_spec(util.find_spec('torch_npu'))"
    (tmp_path / "early.py").write_text(f"import sys\nfrom importlib import util\n{loaded}\n")
    done = suite("pass", "-p", "early", "--npus", "1", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert (
        "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where something else imports torch first"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
