# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A pool of KV cache: filled by an engine that is killed, loaded by the next one, and requests
under faults."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ascend_kv_connector.testing import one_rank
from harness import checkout
from harness.engines import npus
from harness.kv import store_faults
from harness.kv.store_engines import Suite
from harness.models.decoders import qwen3
from harness.progress import track

TP2 = {"engine": {"tensor_parallel_size": 2}, "devices": ["0,1", "0,1"]}
COMMON: dict[str, Any] = {"alone": True, "one by one": True, "devices": ["0", "0"], "settle": 5.0}
CASES: dict[str, dict[str, Any]] = {
    "disk": {"backend": "disk", "harms": ["damaged"]},
    "disk, TP2": {"backend": "disk"} | TP2,
    "Mooncake": {
        "backend": "mooncake",
        "connector": "MooncakeConnectorStoreV1",
        "harms": [
            "owner stopped",
            "owner goes on",
            "master stopped",
            "master goes on",
            "owner killed",
            "master killed",
            "master is back",
        ],
    },
    "Mooncake, TP2": {"backend": "mooncake"} | TP2,
    "a small Mooncake, and disk": {"backend": ["mooncake", "disk"], "mib": 16},
}


def engines(chosen: list[str], requests: int) -> list[str]:
    """Run each case, and print a table; returns what is wrong."""
    wrong, rows = [], []
    with tempfile.TemporaryDirectory() as directory:
        path = qwen3(Path(directory))
        for name in track("pools:", chosen or [*CASES]):
            case = COMMON | CASES[name] | {"model": path, "requests": requests}
            program = [
                sys.executable,
                str(checkout.PROGRAMS / "serve_kv_store.py"),
                json.dumps(case),
            ]
            shared: dict[str, Any] = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_PLUGINS": ""}
            done = npus.run(2, *program, memory="4GiB", timeout=3000, **shared)
            if not (printed := npus.results(done.stdout)):
                print(done.stdout[-3000:], done.stderr[-3000:])
                wrong.append(f"{name}: no result")
                continue
            if left := printed[0].pop("left in /dev/shm"):
                wrong.append(f"{name}: left in /dev/shm: {left}")
            for phase, result in printed[0].items():
                chunks = ", ".join(
                    f"{count} {what}" for what, count in sorted(result.get("chunks", {}).items())
                )
                ended = ", ".join(f"{count} {how}" for how, count in result["ended"].items())
                rows.append(
                    f"| {name} | {phase} | {ended} | {len(result['different'])} |"
                    f" {result['tokens loaded']} | {chunks} | {result['seconds']} |"
                )
                print(rows[-1], flush=True)
                if result["different"] or not result.get("blocks are free", True):
                    wrong.append(f"{name}, {phase}: {result}")
                if phase == "restart" and result["not loaded"]:
                    wrong.append(f"{name}, {phase}: not loaded: {result['not loaded']}")
    print(
        "\n| | | requests ended | different tokens | tokens loaded | chunks | seconds"
        " |\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
    return wrong


def faults(requests: int) -> list[str]:
    """Run requests with fault injection in the pool, and print outcomes of requests and chunks;
    returns what is wrong."""
    ranks = one_rank.__wrapped__()
    next(ranks)
    with tempfile.TemporaryDirectory() as directory:
        suite = Suite(Path(directory))
        result = store_faults.Endurance(
            lambda: suite.make(store_faults.TRANSFER_CONFIG, blocks=64), requests
        ).run()
    print("\n| requests | | chunks | | faults | |\n|---|---|---|---|---|---|")
    result.faults["none"] = result.faults.pop("", 0)
    columns = [
        sorted(each.items(), key=lambda item: -item[1])
        for each in (result.ended, result.chunks, result.faults)
    ]
    columns[0] += [
        ("wrong", len(result.wrong)),
        ("late", len(result.late)),
        ("blocks leaked", result.leaked),
    ]
    for place in range(max(len(column) for column in columns)):
        cells = [
            f"{column[place][0]} | {column[place][1]}" if place < len(column) else " | "
            for column in columns
        ]
        print(f"| {' | '.join(cells)} |")
    counts = {"wrong": result.wrong, "late": result.late, "leaked": result.leaked}
    return [f"pool under faults: {what}: {each}" for what, each in counts.items() if each]
