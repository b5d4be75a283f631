# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of patches by `vllm-ascend doctor`."""

import json

from ascend_platform import extension

DOCTOR = """
import sys
from ascend_cli.main import main
print(main(['doctor', '--json']), file=sys.stderr)
"""


def lines(world):
    out, _ = world.run(DOCTOR)
    result = [
        line
        for line in json.loads(out)["checks"]
        if line["category"] == "patches" and line["title"].startswith("p.")
    ]
    return {line["title"]: (line["state"], line["found"], line["fix"]) for line in result}


def test_doctor_names_a_patch_whose_target_was_renamed(world):
    world.victim("engine", "def step():\n    return 1\n\ndef stop():\n    return 2\n")
    world.patch("step", "victim.engine:step", "original")
    world.patch("stop", "victim.engine:stop", "original")
    world.patch("old", "victim.engine:gone", "original", fingerprint="0", vllm="<0.1")
    version = extension.version("vllm")
    sound = ("ok", f"fits vLLM {version}", "")
    assert lines(world) == {
        "p.step": sound,
        "p.stop": sound,
        "p.old": ("ok", f"not for vLLM {version}", ""),
    }
    world.victim("engine", "def step_once():\n    return 1\n\ndef stop():\n    return 2\n")
    result = lines(world)
    assert result["p.stop"] == sound
    state, message, fix = result["p.step"]
    assert state == "fail"
    assert "target victim.engine:step is missing" in message
    assert fix.endswith("export VLLM_ASCEND_DISABLE_PATCHES=p.step")
    world.variables["VLLM_ASCEND_DISABLE_PATCHES"] = "p.step"
    assert lines(world)["p.step"] == ("ok", "disabled", "")
