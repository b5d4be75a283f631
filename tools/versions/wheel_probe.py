# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check wheels` in an environment with some of the wheels, on an emulated NPU; the
first argument is what it does.

    python wheel_probe.py register DIRECTORY    registers the plugins in many orders, and as
    VLLM_PLUGINS filters them python wheel_probe.py serve DIRECTORY       serves the model in the
    directory python wheel_probe.py filter JSON           what each value of VLLM_PLUGINS in a list
    comes to

Prints one line `RESULT {json}`.
"""

import functools
import importlib.metadata
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable

import torch  # This loads torch_npu, the starting point of each registration.  # noqa: F401
import vllm.platforms
import vllm.plugins  # noqa: F401

MOST = 150  # Orders of one combination; beyond this number they are drawn at random.


def apart(act: Callable[[], object]) -> object:
    """Run a function in a fork; returns its result, passed as JSON, or the exception's text."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            outcome = act()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(outcome).encode())
        os._exit(0)
    os.close(write)
    with open(read) as answers:
        outcome = json.loads(answers.read() or '"the process crashed"')
    os.waitpid(child, 0)
    return outcome


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Our entry points by name."""
    groups = ("vllm.platform_plugins", "vllm.general_plugins")
    points = [point for group in groups for point in importlib.metadata.entry_points(group=group)]
    return {point.name: point for point in points if point.name.partition("_")[0] == "ascend"}


def states() -> dict[str, str]:
    from ascend_platform.plugins import COMPONENTS, registry

    return {name: registry.state(name) for name in COMPONENTS}


def registered(order: list[str]) -> object:
    """States of the components, and of the platform, after every plugin was registered twice in
    this order."""
    points = plugins()
    answers = {name: points[name].load()() for _ in range(2) for name in order}
    from ascend_platform import extension

    return [sorted(answers.items()), states(), extension.offered("attention.dense")]


def filtered(names: str | None) -> object:
    """Whether vLLM selects our platform, and the active siblings, with this value of
    VLLM_PLUGINS."""
    os.environ.pop("VLLM_PLUGINS", None)
    if names is not None:
        os.environ["VLLM_PLUGINS"] = names
    from vllm.platforms import resolve_current_platform_cls_qualname
    from vllm.plugins import load_general_plugins

    platform = resolve_current_platform_cls_qualname() == "ascend_platform.platform.NPUPlatform"
    load_general_plugins()
    try:
        active = sorted(name for name, state in states().items() if state.startswith("active"))
    except ModuleNotFoundError:
        active = []
    return {"platform": platform, "active": active}


def register() -> dict:
    names = sorted(plugins())
    draw = random.Random(0)
    orders = (
        [list(order) for order in itertools.permutations(names)]
        if math.factorial(len(names)) <= MOST
        else [names, names[::-1], *(draw.sample(names, len(names)) for _ in range(MOST - 2))]
    )
    siblings = [name for name in names if name != "ascend"]
    filters = [
        None,
        "",
        "ascend",
        ",".join(names),
        "nothing",
        ",".join(f" {name}" for name in names),
    ]
    filters += [text for name in siblings for text in (name, f"ascend,{name}")]
    complete = "ascend" in names
    return {
        "orders": (
            [[order, apart(functools.partial(registered, order))] for order in orders]
            if complete
            else []
        ),
        "filters": [
            [text, apart(functools.partial(filtered, text))] for text in dict.fromkeys(filters)
        ],
    }


def serve() -> dict:
    from vllm import LLM, SamplingParams

    engine = LLM(sys.argv[2], max_model_len=1024, gpu_memory_utilization=0.3, max_num_seqs=4)
    output = engine.generate(
        ["12+34="], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    return {"answer": output[0].outputs[0].text.strip()}


def chosen(names: str | None) -> object:
    """As `filtered`, with each component's state, and the line that `vllm serve` ends with where no
    device is found."""
    found = filtered(names)
    from ascend_cli.diagnostics import explanations

    line = explanations.explain(RuntimeError("Failed to infer device type"))
    return [found, states(), line]


def choose() -> dict:
    return {
        "chosen": [apart(functools.partial(chosen, names)) for names in json.loads(sys.argv[2])]
    }


if __name__ == "__main__":
    result = {"register": register, "serve": serve, "filter": choose}[sys.argv[1]]()
    print("RESULT", json.dumps(result), flush=True)
