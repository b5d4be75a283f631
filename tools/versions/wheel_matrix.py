# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Install the built wheels in every combination, outside of the workspace, and check plugins and an
engine in each.

    tools/check wheels                      all combinations; writes the table of docs/plugins.md
    tools/check wheels --only "ascend-platform ascend-attention"      one combination; writes nothing
    tools/check wheels --without-engines    only registration and filters, a few seconds for each combination
    tools/check wheels --directory DIR      keep the environment there, and use one that is there

One environment is made, with tools/environment/requirements.txt and ascend-emulator's wheel; the
others are installed and uninstalled. For each combination wheel_probe.py runs on an emulated NPU,
first for the registrations, then for an engine. Exit code 0 means that every one did as it should.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import environment
from harness.progress import track

ROOT = environment.ROOT
PAGE = ROOT / "docs" / "plugins.md"
REGION = re.compile(r"(?<=<!-- matrix: begin -->\n).*(?=<!-- matrix: end -->)", re.DOTALL)
MODEL = ROOT / "tools" / "models" / "adder"
PROBE = Path(__file__).with_name("wheel_probe.py")
PLATFORM = "ascend-platform"
SIBLINGS = (
    "ascend-attention",
    "ascend-cli",
    "ascend-communicator",
    "ascend-kv-connector",
    "ascend-model-loader",
    "ascend-models",
    "ascend-patches",
    "ascend-quantization",
)
LIBRARIES = {
    "ascend-transfer": ("ascend-communicator", "ascend-kv-connector", "ascend-model-loader"),
}
"""Wheels that are no plugins, and the components that require them."""

DEADLINE = 1800  # Seconds for one probe: 150 orders took more than 600 beside other programs.


def combinations() -> Iterator[tuple[str, ...]]:
    """The combinations: each single component, with and without the platform, every pair, and
    all."""
    yield (PLATFORM,)
    yield from ((PLATFORM, one) for one in SIBLINGS)
    yield from ((PLATFORM, *pair) for pair in itertools.combinations(SIBLINGS, 2))
    yield (PLATFORM, *SIBLINGS)
    yield from ((one,) for one in SIBLINGS)


class Environment:
    """An environment outside of the workspace, with one combination of the wheels in it."""

    def __init__(self, directory: Path) -> None:
        self.venv, dist = directory / "venv", directory / "dist"
        self.uv, self.settings = environment.find_uv()
        if not (self.venv / "complete").exists():
            environment.create(self.venv)
            environment.install(
                self.venv, environment.REQUIREMENTS, "installing tools/environment/requirements.txt"
            )
            (self.venv / "complete").touch()
        shutil.rmtree(dist, ignore_errors=True)
        self.run(self.uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(dist))
        self.wheels = {
            path.name.split("-")[0].replace("_", "-"): str(path) for path in dist.glob("*.whl")
        }
        self.choose(())
        self.pip("install", "--no-deps", "--reinstall", self.wheels["ascend-emulator"])

    def run(self, *command: str) -> None:
        subprocess.run(command, cwd=ROOT, env=self.settings, check=True)

    def pip(self, verb: str, *arguments: str) -> None:
        self.run(
            self.uv,
            "pip",
            verb,
            "--quiet",
            "--python",
            str(self.venv / "bin" / "python"),
            *arguments,
        )

    def choose(self, wheels: tuple[str, ...]) -> None:
        """Install these wheels and the libraries that they require, and no other wheel of ours."""
        installed = [
            name
            for name in (PLATFORM, *SIBLINGS, *LIBRARIES)
            if any(self.venv.glob(f"lib/*/site-packages/{name.replace('-', '_')}-*"))
        ]
        if installed:
            self.pip("uninstall", *installed)
        required = (name for name, users in LIBRARIES.items() if {*users} & {*wheels})
        if chosen := [self.wheels[name] for name in (*wheels, *required)]:
            self.pip("install", "--no-deps", *chosen)

    def lacks(self) -> list[str]:
        """Lines of `pip check` about our wheels."""
        command = [str(self.venv / "bin" / "python"), "-m", "pip", "check"]
        said = subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.splitlines()
        return [line for line in said if line.startswith("ascend-")]

    def probe(self, what: str) -> dict:
        """The result of tools/versions/wheel_probe.py, and its log."""
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "ASCEND_", "PYTHON"))
        }
        variables = keep | {
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }
        variables |= {
            "VIRTUAL_ENV": str(self.venv),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [
            "ascend-emulator",
            "run",
            "--memory",
            "4GiB",
            "--",
            "python",
            str(PROBE),
            what,
            str(MODEL),
        ]
        with tempfile.TemporaryDirectory() as elsewhere:
            command[0] = str(self.venv / "bin" / command[0])
            done = subprocess.run(
                command,
                cwd=elsewhere,
                env=variables,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
        lines = [
            line.removeprefix("RESULT ")
            for line in done.stdout.splitlines()
            if line.startswith("RESULT ")
        ]
        log = done.stdout + done.stderr
        return {
            "log": log,
            **(
                json.loads(lines[-1])
                if lines
                else {"error": log.strip().splitlines()[-1] if log else "nothing"}
            ),
        }


def registrations(found: dict, wheels: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """Table cells for registration orders and filters, and failures."""
    wrong = [found["error"]] if "error" in found else []
    orders, filters = found.get("orders", []), found.get("filters", [])
    wrong += [f"order {order}: {outcome}" for order, outcome in orders if outcome != orders[0][1]]
    for names, outcome in filters:
        platform = PLATFORM in wheels and (names is None or "ascend" in names.split(","))
        active = [
            one
            for one in wheels
            if one != PLATFORM and (names is None or one.replace("-", "_") in names.split(","))
        ]
        if PLATFORM in wheels and outcome != {"platform": platform, "active": sorted(active)}:
            wrong.append(f"VLLM_PLUGINS={names!r}: {outcome}")
        if PLATFORM not in wheels and outcome != {"platform": False, "active": []}:
            wrong.append(f"VLLM_PLUGINS={names!r}: {outcome}")
    return str(len(orders)), str(len(filters)), wrong


def served(found: dict, wheels: tuple[str, ...]) -> tuple[str, list[str]]:
    """Table cell for the engine, and failures."""
    if PLATFORM not in wheels:
        # `vllm serve` prints the first of the last two, LLM() the other.
        lines = (
            "No module named 'ascend_platform'",
            "Failed to infer device type",
            "Device string must not be empty",
        )
        said = [line for line in lines if line in found["log"]]
        wrong = (
            []
            if len(said) == 2 and "answer" not in found
            else [f"vLLM says {said}, {found.get('error', 'and serves')}"]
        )
        return f"does not serve: {'; '.join(said)}", wrong
    if "answer" not in found:
        return "does not serve", [found["error"]]
    wrong = [] if found["answer"] == "46" else [f"12+34={found['answer']}"]
    (summary,) = set(re.findall(r"vllm-ascend-all \| .*", found["log"])) or {"no summary line"}
    attention = re.search(r"attention: (fused|built-in)", summary)
    expected = "fused" if "ascend-attention" in wheels else "built-in"
    if attention is None or attention[1] != expected:
        wrong.append(f"attention should be {expected}: {summary}")
    for name in (PLATFORM, *SIBLINGS):
        state = "active" if name in wheels else "not installed"
        if not re.search(rf"\| {name.removeprefix('ascend-')}( [\d.]+)? {state}", summary):
            wrong.append(f"{name} should be {state}: {summary}")
    return f"serves; attention {expected}", wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", metavar="WHEELS", help="one combination, names with spaces between"
    )
    parser.add_argument(
        "--without-engines", action="store_true", help="registration and filters only"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="keep the environment there")
    given = parser.parse_args()
    chosen = [tuple(given.only.split())] if given.only else list(combinations())
    if unknown := {name for wheels in chosen for name in wheels} - {PLATFORM, *SIBLINGS}:
        parser.error(
            f"no component is called {', '.join(sorted(unknown))}; there are"
            f" {', '.join((PLATFORM, *SIBLINGS))}"
        )
    rows, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary:
        there = Environment((given.directory or Path(temporary)).resolve())
        for wheels in track("combinations:", chosen):
            there.choose(wheels)
            orders, filters, wrong = registrations(there.probe("register"), wheels)
            lacks = there.lacks()
            if (not lacks) != (PLATFORM in wheels):
                wrong.append(f"pip check: {lacks}")
            engine = ""
            if not given.without_engines:
                engine, more = served(there.probe("serve"), wheels)
                wrong += more
            name = (
                " + ".join(each.removeprefix("ascend-") for each in wheels)
                if len(wheels) <= len(SIBLINGS)
                else "all"
            )
            rows.append(
                [
                    name if PLATFORM in wheels else f"{name}, forced",
                    orders,
                    filters,
                    lacks[0] if lacks else "clean",
                    engine,
                ]
            )
            print(" | ".join(rows[-1]), *(f"\n  WRONG: {each}" for each in wrong), flush=True)
            failed += bool(wrong)
    print(f"{len(rows) - failed} of {len(rows)} combinations did as they should")
    if not (failed or given.only or given.without_engines):
        head = ["wheels", "orders of `register()`", "filters", "`pip check` of ours", "engine"]
        lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
        PAGE.write_text(
            REGION.sub("\n" + "".join(f"| {line} |\n" for line in lines) + "\n", PAGE.read_text())
        )
    return 1 if failed else 0
