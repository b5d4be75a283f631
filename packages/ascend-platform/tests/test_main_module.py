# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scripts that create an engine: whether its processes can import them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.engines import scripts
from harness.models import small as small_models

ENGINE = "LLM(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2)"
IMPORTS = "import sys\nfrom vllm import LLM\n"
UNGUARDED = f"{IMPORTS}llm = {ENGINE}\n"
GUARDED = f'{IMPORTS}if __name__ == "__main__":\n    llm = {ENGINE}\n'
FUNCTION = f"{IMPORTS}def main():\n    return {ENGINE}\nmain()\n"
REFUSED = (
    "script.py creates an engine when it is imported, as each process of the engine does; fix: put"
    " its code below: if __name__ =="
)
RUN = 'import runpy; runpy.run_path("script.py", run_name="__main__")'
NEXT = "the layout needs 2 NPUs"  # a later check of the configuration


@pytest.mark.parametrize(
    ("script", "from_stdin", "message"),
    [
        (UNGUARDED, False, REFUSED),
        (FUNCTION, False, REFUSED),
        (GUARDED, False, NEXT),
        (
            GUARDED,
            True,
            (
                "the program is read from <stdin>, which the processes of an engine cannot import;"
                " fix: save it to a file"
            ),
        ),
    ],
    ids=["no guard", "a function without a guard", "guard", "stdin"],
)
def test_main_module(script: str, from_stdin: bool, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_models.TINY))
    (tmp_path / "script.py").write_text(script)
    if from_stdin:
        done = subprocess.run(
            [sys.executable, "-", str(tmp_path)],
            input=script,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    else:
        done = scripts.run(RUN, str(tmp_path), cwd=tmp_path)
    lines = done.stderr.strip().splitlines()
    assert message in (done.stderr if message == NEXT else lines[-1]), done.stderr
