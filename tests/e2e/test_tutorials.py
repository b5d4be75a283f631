# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tutorials: the commands of each page, in one shell, have the output that the page shows.

The suite leaves out four pages whose subjects other tests of this folder serve; `tools/check
tutorials` runs them too.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import checkout, every_case
from harness.engines.ports import free_port

PAGES = sorted(
    page
    for page in (checkout.ROOT / "docs").glob("*.md")
    if "test runs the commands of this" in " ".join(page.read_text().split())
)
LEFT_OUT = {"kv-connector", "sleep-mode", "tutorial-several-machines", "tutorial-several-npus"}
BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8000", "8100", "8200", "29501", "29600")
SECONDS = 900
"""Of a page, beside a load: an idle machine takes less than 90."""
IGNORED = ("__pycache__", ".pytest_cache")  # by .gitignore


def blocks(page: str) -> list[tuple[str, str]]:
    """Commands, each with the output that follows it; blocks without a language are not run."""
    collected: list[tuple[str, str]] = []
    for language, text in BLOCK.findall(page):
        if language == "bash":
            collected.append((text, ""))
        else:
            collected[-1] = (collected[-1][0], text)
    return collected


def run(commands: list[str], directory: Path) -> list[str]:
    """Outputs of the commands, which are parts of one script that ends at the first failure."""
    mark = "=== end of a block ==="
    script = "".join(f"{command}\necho '{mark}'\n" for command in commands)
    for port in PORTS:
        script = script.replace(port, str(free_port()))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Without the pytest plugin's NPU: the page's commands start the emulator themselves.
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("ASCEND_EMULATOR_")
    }
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env=variables | {"PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    log = directory / "serve.log"
    assert shell.returncode == 0, log.read_text()[-4000:] if log.exists() else output
    return [part.strip() for part in output.split(mark)[:-1]]


def test_blocks_of_a_page_are_found() -> None:
    page = "```\nnot run\n```\n```bash\ncat file\n```\ntext\n```text\nits content\n```\n```bash\ntrue\n```\n"
    assert blocks(page) == [("cat file\n", "its content\n"), ("true\n", "")]
    assert {"emulator", "quick-start", *LEFT_OUT} <= {page.stem for page in PAGES}
    assert set((checkout.ROOT / "docs").glob("tutorial-*.md")) <= {*PAGES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if every_case.is_wanted() or page.stem not in LEFT_OUT],
    ids=lambda page: page.stem,
)
def test_tutorial_has_the_output_that_it_shows(page: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(checkout.TOOLS)
    steps = blocks(page.read_text())
    outputs = run([command for command, _ in steps], tmp_path)
    shown = [(command, text.strip()) for command, text in steps if text]
    actual = [
        (command, output) for (command, text), output in zip(steps, outputs, strict=True) if text
    ]
    assert actual == shown
    left = {path.name for path in tmp_path.iterdir()} - {"tools", *IGNORED}
    assert not left, "the page leaves files in the checkout"
