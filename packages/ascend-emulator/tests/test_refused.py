# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs that an NPU does not run: each in `refused/` ends with an error that names what is
wrong.

The first lines of a program have the options of `ascend-emulator run` (`# run:`) and what its
output must match (`# refused:`).
"""

import re
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "refused").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_is_refused(run, program):
    header = dict(re.findall(r"^# (run|refused):[ ]*(.*)$", program.read_text(), re.MULTILINE))
    done = run("run", *header["run"].split(), "--", sys.executable, str(program))
    assert done.returncode != 0, done.stdout
    assert re.search(header["refused"], done.stdout + done.stderr), done.stderr
