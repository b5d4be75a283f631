# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Every patch of this wheel, in a vLLM whose target was renamed or changed: disabled at start-up,
in one line with its name."""

import os

import pytest
from ascend_patches.registry import discover
from harness.engines import scripts
from harness.project import vllm_copy

START = """
import sys
from ascend_patches import enter
for scope in ("platform", "engine", "worker"):
    enter(scope)
for module in sys.argv[1:]:
    __import__(module)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("renamed", "reason"),
    [(True, "is missing: "), (False, "has changed: found ")],
    ids=["renamed", "changed"],
)
def test_patch_whose_target_differs_is_disabled_by_name(
    renamed: bool, reason: str, tmp_path
) -> None:
    tree = vllm_copy.make(tmp_path)
    patches = [each for each in discover() if each.package == "ascend_patches.patches"]
    assert len(patches) == 13
    for each in patches:
        file, text = vllm_copy.edited(each.target, renamed)
        vllm_copy.write(tree, file, text)
        if renamed and "." not in each.qualname:
            vllm_copy.rename_in_importers(tree, each.target)
    removed = ("VLLM_PLUGINS", "VLLM_VERSION", "VLLM_ASCEND_DISABLE_PATCHES")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(tree), os.environ.get("PYTHONPATH")])
    )
    done = scripts.run(START, *(each.module for each in patches), env=environment)
    assert done.returncode == 0, done.stderr
    for each in patches:
        (log,) = (
            line for line in done.stderr.splitlines() if f"patch {each.name} disabled: " in line
        )
        assert f"target {each.target} {reason}" in log
