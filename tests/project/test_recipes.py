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
from harness import checkout
from harness.engines import npus

PAGE = checkout.ROOT / "docs" / "recipes.md"
DATA = tomllib.loads((checkout.TOOLS / "generated_docs" / "recipes.toml").read_text())
MODELS: dict[str, dict[str, Any]] = {
    model["name"]: model
    for family in DATA["family"]
    for model in family["model"]
    if model.get("like") != model["name"]
}


def sizes_of(name: str) -> dict[str, Any]:
    return MODELS[MODELS[name].get("like", name)]


@cache
def commands() -> list[tuple[dict[str, str], list[str]]]:
    """Environment variables, and the words after them, of each command of the page."""
    result = []
    for block in re.findall(
        r"^```\n((?:\w+=.*?)?\s*vllm serve .*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        words = shlex.split(block.replace("\\\n", " "))
        start = words.index("vllm")
        result.append((dict(word.split("=", 1) for word in words[:start]), words[start:]))
    return result


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
                if model["name"] not in chip.get("models", [model["name"]]):
                    continue
                assert re.search(
                    rf"^[^\n]*{re.escape(chip['title'])}[^\n]*: (\d+ NPU|does not fit)",
                    part,
                    re.MULTILINE,
                )
    assert len(commands()) > len(MODELS)


def test_models_with_published_speeds_have_a_recipe() -> None:
    """Operators serve these: each type of model, by its config.json."""
    published = tomllib.loads((checkout.TOOLS / "published" / "models.toml").read_text())
    recipes = [model["config"] for model in MODELS.values() if "config" in model]
    known = {(each | each.get("text_config", {}))["model_type"] for each in recipes}
    types = {name: each["model_type"] for name, each in published.items() if "recipe" not in each}
    assert {name for name, kind in types.items() if kind not in known} == set()
    assert {each["recipe"] for each in published.values() if "recipe" in each} <= set(MODELS)


def test_several_machines_have_all_engines_and_one_answers() -> None:
    """Their commands differ in the second machine's rank and role only."""
    spread = [words for _, words in commands() if "--data-parallel-size-local" in words]
    assert len(spread) >= 4
    for first, second in zip(spread[::2], spread[1::2], strict=True):
        engines = option(first, "--data-parallel-size-local")
        assert second == [*first, "--data-parallel-start-rank", str(engines), "--headless"]
        assert 2 * engines == option(first, "--data-parallel-size")
        within = npus_of(first) // option(first, "--data-parallel-size")
        assert within * engines <= max(chip["npus"] for chip in DATA["chip"])


def test_prefill_and_decode_differ_in_role_port_and_npus() -> None:
    apart = [each for each in commands() if "--kv-transfer-config" in each[1]]
    assert len(apart) >= 4
    for (prefill_environ, prefill), (decode_environ, decode) in zip(
        apart[::2], apart[1::2], strict=True
    ):
        roles = [
            json.loads(words[words.index("--kv-transfer-config") + 1])
            for words in (prefill, decode)
        ]
        assert [role["kv_role"] for role in roles] == ["kv_producer", "kv_consumer"]
        assert prefill[: prefill.index("--port")] == decode[: decode.index("--port")]
        npus_given = [
            environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
            for environ in (prefill_environ, decode_environ)
        ]
        if npus_given != [[""], [""]]:
            assert [len(given) for given in npus_given] == [npus_of(prefill)] * 2
            assert not set(npus_given[0]) & set(npus_given[1])


def test_the_command_that_confirms_a_figure_has_its_load() -> None:
    (command,) = re.findall(r"^vllm-ascend plan (.+)$", PAGE.read_text(), re.MULTILINE)
    name, *words = command.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    load = DATA["load"] | sizes_of(name)
    chip = next(each for each in DATA["chip"] if each["title"] == "Atlas A3")
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
        VLLM_ASCEND_KV_SECRET="which both instances know",
    )
    accepted = npus.by_name(done)
    assert {name: result["error"] for name, result in accepted.items() if "error" in result} == {}
    assert list(accepted) == [each["name"] for each in asked]
    for _, words in commands():
        result, sizes = accepted[" ".join(words)], sizes_of(words[2])
        assert result["architecture"] == sizes["config"]["architectures"][0]
        assert result["npus"] == npus_of(words)
        assert result["worker"] == "ascend_platform.worker.worker.NPUWorker"
        assert result["length"] == sizes.get("length", result["length"])


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
    from ascend_cli import main

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
