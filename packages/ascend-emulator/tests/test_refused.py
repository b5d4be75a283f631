# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs that an NPU does not run: each in `refused/` ends with an error that names what is
wrong.

The first lines of a program have the options of `ascend-emulator run` (`# run:`) and what its
output must match (`# refused:`). The error names its class, unless `# class:` has other words.
"""

import re
import sys
from pathlib import Path

import pytest

CLASS = r"not emulated| \((undefined on the device|CANN refuses, inferred)\)| \(rule [\w.-]+, "
PROGRAMS = sorted((Path(__file__).parent / "refused").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_is_refused(run, program):
    header = dict(
        re.findall(r"^# (run|refused|class):[ ]*(.*)$", program.read_text(), re.MULTILINE)
    )
    done = run("run", *header["run"].split(), "--", sys.executable, str(program))
    assert done.returncode != 0, done.stdout
    assert re.search(header["refused"], done.stdout + done.stderr), done.stderr
    assert re.search(header.get("class", CLASS), done.stdout + done.stderr), done.stderr
