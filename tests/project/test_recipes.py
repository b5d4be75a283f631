# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""docs/recipes.md: its commands are those that vLLM parses and the platform accepts, and its models
have the published sizes.

That the page is what tools/docs-tables makes of tools/generated_docs/recipes.toml is in
test_docs.py.
"""

import json
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import checkout, npus

PAGE = checkout.ROOT / "docs" / "recipes.md"
DATA = tomllib.loads((checkout.TOOLS / "generated_docs" / "recipes.toml").read_text())
MODELS: dict[str, dict[str, Any]] = {
    model["name"]: model for family in DATA["family"] for model in family["model"]
}


def sizes_of(name: str) -> dict[str, Any]:
    return MODELS[MODELS[name].get("like", name)]


@cache
def commands() -> list[tuple[dict[str, str], list[str]]]:
    """Environment variables, and the words after them, of each command of the page."""
    found = []
    for block in re.findall(
        r"^```\n((?:\w+=.*?)?\s*vllm serve .*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        words = shlex.split(block.replace("\\\n", " "))
        start = words.index("vllm")
        found.append((dict(word.split("=", 1) for word in words[:start]), words[start:]))
    return found


def option(words: list[str], name: str) -> int:
    return int(words[words.index(name) + 1]) if name in words else 1


def npus_of(words: list[str]) -> int:
    tensor, pipeline, data = (
        option(words, f"--{name}-parallel-size") for name in ("tensor", "pipeline", "data")
    )
    return tensor * pipeline * data


def test_every_model_and_chip_has_a_command_or_a_reason() -> None:
    text = PAGE.read_text()
    for family in DATA["family"]:
        assert f"### {family['title']}\n" in text
        for model in family["model"]:
            part = (
                text.partition(f"**{model.get('title', model['name'])}**")[2]
                .partition("\n**")[0]
                .partition("\n### ")[0]
            )
            for chip in DATA["chip"]:
                assert re.search(
                    rf"^[^\n]*{re.escape(chip['title'])}[^\n]*: (\d+ NPU|does not fit)",
                    part,
                    re.MULTILINE,
                )
    assert len(commands()) > len(MODELS)


def test_the_command_that_confirms_a_figure_has_its_load() -> None:
    (command,) = re.findall(r"^vllm-ascend plan (.+)$", PAGE.read_text(), re.MULTILINE)
    name, *words = command.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    load, chip = DATA["load"] | sizes_of(name), DATA["chip"][-1]
    assert given == {
        "--soc": chip["soc"],
        "--npus": str(chip["npus"]),
        "--quantization": load["quantization"],
    } | {f"--{each}": str(load[each]) for each in ("requests", "input", "output")}


@pytest.mark.slow
def test_every_command_is_accepted_by_vllm_and_the_platform(tmp_path: Path) -> None:
    asked = [
        {"name": " ".join(words), "arguments": words[2:], "config": sizes_of(words[2])["config"]}
        for _, words in commands()
    ]
    file = tmp_path / "commands.json"
    file.write_text(json.dumps(asked))
    largest = max(npus_of(words) for _, words in commands())
    done = npus.run(
        largest,
        sys.executable,
        str(checkout.PROGRAMS / "parse_serve_commands.py"),
        str(file),
        HF_HUB_OFFLINE="1",
    )
    accepted = npus.by_name(done)
    assert {name: found["error"] for name, found in accepted.items() if "error" in found} == {}
    assert list(accepted) == [each["name"] for each in asked]
    for _, words in commands():
        found, sizes = accepted[" ".join(words)], sizes_of(words[2])
        assert found["architecture"] == sizes["config"]["architectures"][0]
        assert found["npus"] == npus_of(words)
        assert found["worker"] == "ascend_platform.worker.worker.NPUWorker"
        assert found["length"] == sizes.get("length", found["length"])


def test_variables_are_explained_and_set_where_they_apply() -> None:
    known = {variable["name"]: variable for variable in DATA["variable"]}
    for variable in known.values():
        assert (
            f"- `{variable['name']}`: {variable['why']} ([documentation]({variable['source']}))"
            in PAGE.read_text()
        )
    for environment, words in commands():
        assert set(environment) <= set(known)
        # Each group has its own, because CANN does not support several at a time.
        assert "HCCL_OP_EXPANSION_MODE" not in environment
        assert ("VLLM_USE_MODELSCOPE" in environment) == words[2].startswith("vllm-ascend/")
        # The engine chooses these itself, for KV transfer, sleep mode and eager mode otherwise.
        assert {"PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE"}.isdisjoint(environment)
        if int(environment.get("HCCL_BUFFSIZE", 201)) <= 200:
            pytest.fail(f"{' '.join(words)}: HCCL_BUFFSIZE is at most its default")


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if "billions" in model])
def test_sizes_give_the_published_number_of_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ascend_platform.cli import main

    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    kind = MODELS[name].get("quantization", "none")
    main.main(
        [
            "plan",
            str(tmp_path),
            "--soc",
            "Ascend910_93",
            "--npus",
            "16",
            "--requests",
            "1",
            "--quantization",
            kind,
        ]
    )
    (weights,) = re.findall(r": ([\d.]+) billion weights", capsys.readouterr().out)
    assert float(weights) == pytest.approx(MODELS[name]["billions"], rel=0.005)
