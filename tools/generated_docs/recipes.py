# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The recipes of docs/recipes.md: a command for each model and chip, with the layout that
``vllm-ascend plan`` finds best.

The models are in recipes.toml, with the sizes that their published config.json states, so that
nothing is downloaded.
"""

import contextlib
import importlib.metadata
import io
import json
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("recipes.toml")
MIB = 1 << 20
DEFAULT_BUFFER = 200
"""MiB of HCCL_BUFFSIZE unless it is set."""


MACHINES = "--data-parallel-size-local {} --data-parallel-address 10.0.0.1"
"""Options of each machine if there are several: its data-parallel engines, the first one's address."""
ROLES = {"prefill": ("kv_producer", 8100), "decode": ("kv_consumer", 8200)}
"""Role in --kv-transfer-config and port of the two instances of disaggregated prefill."""


@dataclass(frozen=True)
class Recipe:
    """One recipe. ``layout`` is as `vllm-ascend plan --json` has it; ``{}`` where one NPU serves
    and nothing is planned."""

    model: Mapping[str, Any]
    chip: Mapping[str, Any]
    npus: int  # Of each instance; 0 means that the model does not fit.
    layout: Mapping[str, Any]
    environment: Mapping[str, str]
    options: tuple[str, ...]

    @property
    def commands(self) -> dict[str, str]:
        """For a shell, by title: variables, and `vllm serve` with an option a line."""
        if self.model.get("split"):
            return {
                f"{role.capitalize()} instance:": self._command(position * self.npus, *options)
                for position, (role, options) in enumerate(self._roles().items())
            }
        if (machines := self.model.get("machines", 1)) == 1:
            return {"": self._command(0)}
        engines = self.layout["layout"]["data"] // machines
        options = MACHINES.format(engines)
        return {
            "First machine, which answers for all:": self._command(0, options),
            "Second machine:": self._command(
                0, options, f"--data-parallel-start-rank {engines}", "--headless"
            ),
        }

    @property
    def shares_server(self) -> bool:
        """Whether both instances fit on one server."""
        return bool(self.model.get("split")) and 2 * self.npus <= self.chip["npus"]

    def _roles(self) -> dict[str, tuple[str, str]]:
        transfer = (
            '--kv-transfer-config \'{{"kv_connector": "AscendP2PConnector", "kv_role": "{}"}}\''
        )
        return {
            role: (f"--port {port}", transfer.format(name)) for role, (name, port) in ROLES.items()
        }

    def _command(self, first: int, *options: str) -> str:
        environment = dict(self.environment)
        if self.shares_server:
            npus = range(first, first + self.npus)
            environment["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, npus))
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        lines = [variables, f"vllm serve {self.model['name']}", *self.options, *options]
        return " \\\n    ".join(filter(None, lines))


def data() -> dict[str, Any]:
    """recipes.toml, where a model that is ``like`` another has the other's entries too."""
    found = tomllib.loads(DATA.read_text())
    models = {
        model["name"]: model
        for family in found["family"]
        for model in family["model"]
        if "like" not in model
    }
    for family in found["family"]:
        family["model"] = [
            models.get(model.get("like", ""), {}) | model for model in family["model"]
        ]
    return found


def recipes(model: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Recipe]:
    """A recipe for each chip that has the model."""
    model = found["load"] | model
    for chip in found["chip"]:
        if model["name"] not in chip.get("models", [model["name"]]):
            continue
        layout: Mapping[str, Any] = {}
        npus = model.get("npus", 0)
        counts = (
            [chip["npus"] * model.get("machines", 1)]
            if model.get("engines")
            else [count for count in (1, 2, 4, 8, 16) if count <= chip["npus"]]
        )
        for count in () if npus else counts:
            if best := _best(model, chip, count):
                npus, layout = count, best
                break
        yield Recipe(
            model,
            chip,
            npus,
            layout,
            _environment(model, npus, found["variable"]),
            _options(model, layout),
        )


def _best(model: Mapping[str, Any], chip: Mapping[str, Any], npus: int) -> Mapping[str, Any] | None:
    """The fastest layout whose KV cache holds all requests, and in each engine one request of the
    model's length.

    It has one engine, or for a model with ``engines`` several, and experts spread over all of them.
    Each engine is on one of the ``machines``, which have as many engines each.
    """
    load = (model["requests"], model["input"], model["output"])
    machines = model.get("machines", 1)
    for one in _plan(model["name"], chip["soc"], npus, model.get("quantization", "none"), *load):
        sizes = one["layout"]
        if sizes["tensor"] * sizes["pipeline"] > chip["npus"] or sizes["data"] % machines:
            continue
        wanted = (
            (sizes["data"] > 1 and sizes["expert"]) if model.get("engines") else sizes["data"] == 1
        )
        if (
            wanted
            and one["requests"] == model["requests"]
            and one["kv_tokens"] >= model["length"] * sizes["data"]
        ):
            return one
    return None


@cache
def _plan(
    name: str, soc: str, npus: int, quantization: str, requests: int, given: int, output: int
) -> list[dict[str, Any]]:
    """Output of `vllm-ascend plan --json`, best first; empty if no layout fits."""
    model = next(
        model for family in data()["family"] for model in family["model"] if model["name"] == name
    )
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="vllm-ascend")
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(printed):
        (Path(directory) / "config.json").write_text(json.dumps(model["config"]))
        options = (
            f"--soc {soc} --npus {npus} --requests {requests} --input {given} --output {output}"
            " --json".split()
        )
        quantized = ["--quantization", quantization]
        if command.load()(["plan", directory, *options, *quantized]):
            raise ValueError(f"vllm-ascend plan refuses {name} on {npus} {soc}")
    return json.loads(printed.getvalue())["layouts"]


def _environment(
    model: Mapping[str, Any], npus: int, variables: list[dict[str, str]]
) -> dict[str, str]:
    config = model["config"] | model["config"].get("text_config", {})
    copies = config["num_experts_per_tok"] if model.get("engines") else 1
    moved = -(-model["batched_tokens"] * copies * config.get("hidden_size", 0) * 2 // MIB)
    wanted = {
        "buffer": npus > 1 and moved > DEFAULT_BUFFER,
        "devices": False,  # Each command has its own.
        "modelscope": model.get("modelscope", False),
    }
    chosen = [
        variable
        for variable in variables
        if wanted.get(variable.get("when", ""), "when" not in variable)
    ]
    return {variable["name"]: variable.get("value", str(moved)) for variable in chosen}


def _options(model: Mapping[str, Any], layout: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = layout.get("layout", {})
    options = [
        f"--{name}-parallel-size {sizes[name]}"
        for name in ("tensor", "pipeline", "data")
        if sizes.get(name, 1) > 1
    ]
    options += ["--enable-expert-parallel"] * bool(sizes.get("expert"))
    if "length" in model:
        options += [f"--max-model-len {model['length']}"]
    if layout:
        options += [
            f"--max-num-seqs {model['requests'] // sizes['data']}",
            f"--max-num-batched-tokens {model['batched_tokens']}",
        ]
    return (*options, *model.get("options", ()))


def page() -> str:
    """The part of docs/recipes.md between its marks."""
    found, parts = data(), []
    for family in found["family"]:
        parts.append(f"### {family['title']}")
        for model in family["model"]:
            note = f" ({model['note']})" if "note" in model else ""
            parts.append(f"**{model.get('title', model['name'])}**{note}")
            commands: dict[str, list[Recipe]] = {}
            for recipe in recipes(model, found):
                commands.setdefault(str(recipe.commands) if recipe.npus else "", []).append(recipe)
            for command, same in commands.items():
                chips = ", ".join(recipe.chip["title"] for recipe in same)
                if command:
                    parts.append(f"{chips}: {_figures(same)}")
                    for title, text in same[0].commands.items():
                        parts += [title] * bool(title) + [f"```\n{text}\n```"]
                else:
                    machines = model.get("machines", 1)
                    where = f"{machines} servers" if machines > 1 else "one server"
                    parts.append(
                        f"{chips}: does not fit on {where}; see [Multi-node"
                        " inference](multi-node.md)."
                    )
    return "\n\n".join(parts)


def _figures(same: list[Recipe]) -> str:
    """NPUs, and what the plan says of memory and speed on each chip."""
    count = f"{same[0].npus} NPU{'s' * (same[0].npus > 1)}"
    if same[0].model.get("split"):
        count += " for each instance" + ("" if same[0].shares_server else ", on two servers")
    elif "machines" in same[0].model:
        count += f" of {same[0].model['machines']} servers"
    if not same[0].layout:
        return f"{count}."
    cache = " / ".join(f"{one.layout['cache'] / 2**30:.0f}" for one in same)
    speeds = [
        " / ".join(
            "{:.0f} to {:.0f}".format(*one.layout["modelled"][regime]["tokens_per_second"])
            for one in same
        )
        for regime in ("tuned", "typical")
    ]
    return (
        f"{count}, {cache} GiB of KV cache per NPU, modelled tokens/s: {speeds[0]} tuned,"
        f" {speeds[1]} typical."
    )


def variables() -> str:
    """A list of the environment variables."""
    return "\n".join(
        f"- `{each['name']}`: {each['why']} ([documentation]({each['source']}))"
        for each in data()["variable"]
    )
