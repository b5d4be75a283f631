# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The conformance suite on vLLM's own connectors: `tools/check transfers connectors` runs it with
pytest.

With `VLLM_TARGET_DEVICE=cpu` on vLLM's platform for CPUs, otherwise on an emulated NPU, where the
platform accepts the connectors because their module is named (`kv_connector_module_path`).
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from ascend_kv_connector import testing
from ascend_kv_connector.testing import ConnectorTests, HandoffTests, one_rank  # noqa: F401
from ascend_kv_connector.testing import engine as testing_engine
from harness import checkout
from harness.engines.ports import free_port
from harness.kv.mooncake_pool import mooncake_pool

KEPT = checkout.TOOLS / "generated_docs" / "connectors.json"
PLATFORMS = {"CPU": {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}, "NPU": {}}
"""Environments by platform of vLLM."""

HOURS = 1.0
"""Most that a platform may take."""

CPU = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
PORTS = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")
"""Variables with a port of vLLM's connectors, which two engines of a process cannot share."""


def named(name: str, **extra_config: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of one of vLLM's connectors."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    module = KVConnectorFactory._registry[name]().__module__
    given = {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}
    return given | {"kv_connector_extra_config": extra_config}


class InTree(ConnectorTests):
    """A connector of vLLM's, with one tensor for a layer."""

    __test__ = False
    device, paged = "cpu" if CPU else "npu", False
    extra_config: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Finalizers of connectors that were shut down wait forever, such as for a ZMQ context
        whose sockets are open."""
        gc.disable()
        monkeypatch.setattr(testing_engine, "PATIENCE", 120.0)

    def config(self, transfer: dict[str, Any]) -> Any:
        for variable in PORTS:
            os.environ[variable] = str(free_port())
        name = type(self).__name__
        return super().config(named(name, **self.extra_config) | self.transfer | transfer)


class ExampleConnector(InTree):
    __test__ = True

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.extra_config = {"shared_storage_path": str(tmp_path)}  # type: ignore[misc]


class DecodeBenchConnector(InTree):
    __test__ = True


class OffloadingConnector(InTree):
    __test__, keeps = True, True
    extra_config: ClassVar[dict[str, Any]] = {"cpu_bytes_to_use": 50_000_000}


class SimpleCPUOffloadConnector(OffloadingConnector):
    pass


class NixlConnector(InTree, HandoffTests):
    __test__ = True

    @pytest.fixture(autouse=True)
    def blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks of 32 tokens, of which vLLM's attention for CPUs takes multiples."""
        for module in (testing, testing_engine):
            monkeypatch.setattr(module, "BLOCK", 32)


class MooncakeConnector(NixlConnector):
    extra_config: ClassVar[dict[str, Any]] = {"mooncake_protocol": "tcp"}


class MultiConnector(NixlConnector):
    """Of NixlConnector and ExampleConnector."""

    @pytest.fixture(autouse=True)
    def parts_of_it(self, tmp_path: Path) -> None:
        parts = [
            named("NixlConnector"),
            named("ExampleConnector", shared_storage_path=str(tmp_path)),
        ]
        self.extra_config = {"connectors": parts}  # type: ignore[misc]


class MooncakeStoreConnector(InTree):
    __test__, keeps = True, True

    @pytest.fixture(autouse=True, scope="class")
    def pool(self) -> Iterator[None]:
        with mooncake_pool() as pool:
            os.environ["MOONCAKE_CONFIG_PATH"] = str(pool.config)
            yield


def run(chosen: list[str]) -> None:
    """The command: run the suite on both platforms, and write the table of
    docs/reports/kv-connector-tests.md; names choose connectors."""
    for place, variables in PLATFORMS.items():
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory, "report.xml")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--show-capture=no",
                "--tb=native",
            ]
            command += [
                "-o",
                "python_classes=*Connector",
                f"--junitxml={report}",
                "-k",
                " or ".join(chosen or ["Connector"]),
            ]
            process = subprocess.Popen(
                [*command, __file__], env=os.environ | variables, cwd=checkout.ROOT
            )
            until = monotonic() + HOURS * 3600
            while process.poll() is None and not report.exists() and monotonic() < until:
                sleep(1.0)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()  # A connector's threads may prevent it from exiting.
            kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            for case in ElementTree.parse(report).iter("testcase"):
                failed = next((each for each in case if each.tag in ("failure", "error")), None)
                result = (
                    "skipped"
                    if case.find("skipped") is not None
                    else "passed"
                    if failed is None
                    else _cause(failed)
                )
                name = case.attrib["classname"].rpartition(".")[2]
                kept.setdefault(name, {}).setdefault(place, {})[
                    case.attrib["name"].removeprefix("test_")
                ] = result
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(
        subprocess.run([sys.executable, checkout.TOOLS / "docs-tables"], check=False).returncode
    )


def _cause(failed: ElementTree.Element) -> str:
    """The first line of an error, or the location of an assertion without a message."""
    line = (
        failed.attrib.get("message", "")
        .strip()
        .partition("\n")[0]
        .removeprefix("failed on setup with ")
        .strip('"')
    )
    if line == "AssertionError" and (
        places := re.findall(r'/([^/"]+)", line (\d+)', failed.text or "")
    ):
        line += " in {}, line {}".format(*places[-1])
    return re.sub(r"\['.*'\]", "requests", line.partition(", first at")[0])[:200]
