# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The manifest of docs/kubernetes.md: its parts fit together, and vLLM and the platform accept its
command. There is no cluster here that it could be applied to."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import checkout
from harness.engines import npus


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    page = (checkout.ROOT / "docs" / "kubernetes.md").read_text()
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(manifest)}


@pytest.fixture(scope="module")
def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def test_parts_of_the_manifest_fit_together(
    objects: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    spec = objects["Deployment"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == labels == objects["Service"]["spec"]["selector"]
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    (port,) = container["ports"]
    given = dict(zip(container["args"], container["args"][1:], strict=False))
    assert given["--port"] == str(port["containerPort"])
    probes = [value["httpGet"] for name, value in container.items() if name.endswith("Probe")]
    assert [probe["port"] for probe in probes] == [port["name"]] * 3
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert int(given["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    dockerfile = (checkout.ROOT / "Dockerfile").read_text()
    (home,) = re.findall(r"^WORKDIR (/home/\S+)$", dockerfile, re.MULTILINE)
    assert container["volumeMounts"][-1]["mountPath"] == f"{home}/.cache"


@pytest.mark.slow
def test_command_of_the_manifest_is_accepted(container: dict[str, Any], tmp_path: Path) -> None:
    recipes = tomllib.loads((checkout.TOOLS / "generated_docs" / "recipes.toml").read_text())
    models = [model for family in recipes["family"] for model in family["model"]]
    (program, command, name, *options) = container["args"]
    assert (program, command) == ("vllm", "serve")
    (config,) = (model["config"] for model in models if model["name"] == name)
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"name": "", "arguments": [name, *options], "config": config}]))
    (count,) = container["resources"]["limits"].values()
    done = npus.run(
        count, sys.executable, str(checkout.PROGRAMS / "parse_serve_commands.py"), str(file)
    )
    (accepted,) = npus.by_name(done).values()
    assert accepted["worker"] == "ascend_platform.worker.worker.NPUWorker"
    assert accepted["npus"] == count
