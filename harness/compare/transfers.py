# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV transfer between two engines, under faults, and its throughput: `tools/check transfers`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ascend_kv_connector.testing import one_rank
from harness import checkout
from harness.compare import quantized
from harness.engines import npus
from harness.kv import identity_checks, in_tree, request_faults, store_checks, throughput
from harness.kv.instances import Instance
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.store_engines import Suite
from harness.kv.transfer_faults import Endurance
from harness.models import by_type as models
from harness.models import hybrid
from harness.models.decoders import qwen3
from harness.progress import track

TP2, PP2, BF16, FP16 = (
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
)
PROLOG = BF16 | {"additional_config": {"ascend": {"platform": {"mla_prolog": True}}}}
ONE, OTHER = {"devices": "0"}, {"devices": "1"}
LOGPROBS = {"logprobs": True, "kill": 0}
CACHING = {"enable_prefix_caching": True}
DRAFTS = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_prefix_caching": False,
}
STATES = {"states": "Qwen3-Next", "layerwise": 0, "kill": 0}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "TP1 to TP1": (ONE, OTHER, {}),
    "TP2 to TP1": ({"devices": "0,1", "engine": TP2}, {"devices": "2"}, {}),
    "TP1 to TP2": (ONE, {"devices": "1,2", "engine": TP2}, {}),
    "PP2 to TP1": ({"devices": "0,1", "engine": PP2}, {"devices": "2"}, {}),
    "latent attention, TP2 to TP1": (
        {"devices": "0,1", "engine": TP2},
        {"devices": "2"},
        {"kind": "deepseek-v3, yarn", "kill": 0},
    ),
    "latent attention, TP1 to TP2": (
        ONE,
        {"devices": "1,2", "engine": TP2},
        {"kind": "deepseek-v3, yarn", "kill": 0},
    ),
    "latent attention, mla_prolog": (
        ONE | {"engine": PROLOG},
        OTHER | {"engine": PROLOG},
        LOGPROBS | {"kind": "deepseek-v3, mla_prolog"},
    ),
    "sparse latent attention, TP2 to TP1": (
        {"devices": "0,1", "engine": TP2},
        {"devices": "2"},
        {"kind": "glm-5, shared selections", "kill": 0},
    ),
    "sparse latent attention, TP1 to TP2": (
        ONE,
        {"devices": "1,2", "engine": TP2},
        {"kind": "glm-5, shared selections", "kill": 0},
    ),
    "windows": (
        ONE,
        OTHER | {"tiers": {"cpu_bytes_to_use": 200 << 20}},
        {"windows": True, "layerwise": 0, "kill": 0},
    ),
    "windows, TP1 to TP2": (
        ONE,
        {"devices": "1,2", "engine": TP2},
        {"windows": True, "layerwise": 0, "kill": 0},
    ),
    "HCCL": (ONE, OTHER, {"transfer": {"transport": "hccl"}}),
    "states": (ONE, OTHER, STATES),
    "states, prefix caching": (ONE | {"engine": CACHING}, OTHER | {"engine": CACHING}, STATES),
    "states, TP2": ({"devices": "0,1", "engine": TP2}, {"devices": "2,3", "engine": TP2}, STATES),
    "states, PP2 to TP1": (
        {"devices": "0,1", "engine": PP2},
        {"devices": "2"},
        STATES | {"states": f"Qwen3-Next{hybrid.HALVES}"},
    ),
    "states, MTP": (
        ONE | {"engine": DRAFTS},
        OTHER | {"engine": DRAFTS},
        STATES | {"drafts": True},
    ),
    "states, HCCL": (ONE, OTHER, STATES | {"transfer": {"transport": "hccl"}}),
    "states, bfloat16": (ONE | {"engine": BF16}, OTHER | {"engine": BF16}, LOGPROBS | STATES),
    "bfloat16": (ONE | {"engine": BF16}, OTHER | {"engine": BF16}, LOGPROBS),
    "bfloat16, Ascend950PR to Ascend950DT": (
        ONE | {"engine": BF16, "soc": "Ascend950PR_9599"},
        OTHER | {"engine": BF16, "soc": "Ascend950DT_9591"},
        LOGPROBS,
    ),
    "bfloat16, adder": (
        ONE | {"engine": BF16},
        OTHER | {"engine": BF16},
        LOGPROBS | {"adder": True},
    ),
    "bfloat16, adder, HCCL": (
        ONE | {"engine": BF16},
        OTHER | {"engine": BF16},
        {"adder": True, "transfer": {"transport": "hccl"}},
    ),
    "float16, int8 KV cache": (
        ONE | {"engine": FP16},
        OTHER | {"engine": FP16},
        LOGPROBS | {"int8": True},
    ),
}
"""By name the two instances, and what else is of the case; in float32 where it does not say
otherwise."""


def engines(chosen: list[str], requests: int, seed: int) -> list[str]:
    """Run each shape with prompts of this seed, and print a table; returns what is wrong."""
    wrong, rows, gaps = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        path = qwen3(Path(directory))
        for name in track("shapes:", chosen or [*SHAPES]):
            prefill, decode, more = SHAPES[name]
            case: dict[str, Any] = {
                "model": path,
                "seed": seed,
                "prefill": prefill,
                "decode": decode,
                "pull": requests,
                "layerwise": requests,
                "kill": 16,
            } | more
            case["transfer"] = {"transfer_timeout": 60} | more.get("transfer", {})
            if more.get("adder"):
                case["model"] = str(checkout.ADDER)
            if kind := "gemma3, windows between" if more.get("windows") else more.get("kind"):
                case["model"] = str(Path(directory, kind))
                if not Path(directory, kind).exists():
                    models.decoder(Path(directory, kind), kind)
            if states := more.get("states"):
                # Seconds. All prompts are computed before the first is read.
                case["transfer"]["lease"] = 300
                case["model"] = str(
                    hybrid.make(states, Path(directory), drafts=more.get("drafts", False))
                )
            if more.get("int8"):
                case["model"] = str(
                    quantized.make(
                        "dense", "ascend", "float16", Path(directory), cache=True, only=-1
                    ).path
                )
            program = [
                sys.executable,
                str(checkout.PROGRAMS / "serve_kv_transfer.py"),
                json.dumps(case),
            ]
            done = npus.run(
                4, *program, memory="8GiB", timeout=3000, VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS=""
            )
            printed = npus.results(done.stdout)
            if not printed:
                print(done.stdout[-3000:], done.stderr[-3000:])
                wrong.append(f"{name}: no result")
                continue
            for phase, result in printed[0].items():
                differing = {each.split(":")[0].split(",")[0] for each in result["different"]}
                rows.append(
                    f"| {name} | {phase} | {_counts(result['ended'])} | {len(differing)} | "
                    f"{len(result['not transferred'])} | {result['seconds']} |"
                )
                if "diverged" in result:
                    gaps.append(_gaps(name, phase, result))
                    if (
                        max((each["gap"] for each in result["diverged"]), default=0.0)
                        <= 2 * result["log-probability difference"][0]
                    ):
                        # The log-probabilities of both tokens may change this much in another
                        # batch.
                        result["different"] = []
                good = (
                    not result["different"]
                    and not result["not transferred"]
                    and all(result["blocks are free"])
                )
                good = good and (phase == "killed" or not result.get("failed"))
                # The two instances round differently without any transfer.
                if not good and phase != "no transfer":
                    wrong.append(f"{name}, {phase}: {result}")
                print(rows[-1], flush=True)
            if any(each.startswith(f"{name}, ") for each in wrong):
                print(done.stdout[-6000:], done.stderr[-3000:], file=sys.stderr, flush=True)
    print(
        "\n| | KV cache is read | requests ended | different tokens | recomputed | seconds"
        " |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
    if gaps:
        print(
            "\n| | | positions | different tokens | their gap, at most | positions with such a gap"
            " | difference: max | mean |"
        )
        print("|---" * 8 + "|")
        print("\n".join(gaps))
    return wrong


def _gaps(name: str, phase: str, result: dict[str, Any]) -> str:
    """A row of what log-probabilities say of the tokens that are others."""
    max_diff, mean = result["log-probability difference"]
    gap = f"{max(each['gap'] for each in result['diverged']):.3f}" if result["diverged"] else ""
    small = result["positions with such a gap"] or ""
    return (
        f"| {name} | {phase} | {result['positions']} | {len(result['diverged'])} | {gap} | {small}"
        f" | {max_diff:.3f} | {mean:.4f} |"
    )


def _counts(ended: dict[str, int]) -> str:
    return ", ".join(
        f"{count} {how}" for how, count in sorted(ended.items(), key=lambda item: -item[1])
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "finished prompts": ({}, {}, False),
    "finished prompts, TP2 to TP1, without checksums": ({"tp": 2}, {"verify": False}, False),
    "layer by layer": ({}, {}, True),
    "layer by layer, TP1 to TP2": ({}, {"tp": 2}, True),
}


def faults(requests: int) -> list[str]:
    """Run each case under faults, and print a table; returns what is wrong."""
    wrong, results = [], {}
    for name in track("cases under faults:", CASES):
        one, other, layerwise = CASES[name]
        network = InMemoryNetwork()
        networks: list[Any] = []

        def make(
            name: str,
            network: InMemoryNetwork = network,
            networks: list[Any] = networks,
            **shape: Any,
        ) -> Any:
            networks.append(Instance(network, name, **shape))
            return networks[-1]

        results[name] = result = Endurance(make, network, requests, one, other, layerwise).run()
        print(name, result, flush=True)
        for what in ("wrong", "late", "leaked"):
            if getattr(result, what):
                wrong.append(f"{name}: {what}: {getattr(result, what)}")
        for instance in networks:
            instance.close()
    kinds = sorted(
        {kind for result in results.values() for kind in result.ended},
        key=lambda kind: (kind.startswith("("), kind),
    )
    print("\n| outcome |", " | ".join(results), "|")
    print("|---" * (len(results) + 1) + "|")
    for kind in kinds:
        print(
            f"| {kind} |",
            " | ".join(str(result.ended[kind] or "") for result in results.values()),
            "|",
        )
    for what in ("wrong", "late", "leaked"):
        print(
            f"| {what} |",
            " | ".join(str(len(getattr(result, what))) for result in results.values()),
            "|",
        )
    return wrong


def requests(count: int, restarts: int, seed: int) -> list[str]:
    """Run clients, a router and two instances under faults, and print tables; returns what is
    wrong."""
    ranks = one_rank.__wrapped__()
    next(ranks)
    with tempfile.TemporaryDirectory() as directory:
        suite = Suite(Path(directory))
        suite.device = "cpu"  # the in-memory transport's
        result = request_faults.Endurance(suite.make, count, restarts, seed).run()
    print(
        f"\n{result.requests} prompts, {result.loaded} transferred; events:"
        f" {_counts(result.events)}"
    )
    print(f"reads of KV cache: {_counts(result.faults)}\n")
    outcomes = sorted({name.rpartition(": ")[2] for name in result.ended})
    print("| |", " | ".join(outcomes), "|")
    print("|---" * (len(outcomes) + 1) + "|")
    for kind in request_faults.KINDS:
        print(
            f"| {kind} |",
            " | ".join(str(result.ended[f"{kind}: {outcome}"] or "") for outcome in outcomes),
            "|",
        )
    counts = {"wrong": result.wrong, "late": result.late, "leaked": result.leaked}
    print("\n" + ", ".join(f"{what} {len(each)}" for what, each in counts.items()))
    return [f"requests under faults: {what}: {each}" for what, each in counts.items() if each]


PARTS = ("engines", "faults", "requests", "throughput", "store", "identity", "connectors")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="tools/check transfers")
    parser.add_argument(
        "part", nargs="?", choices=PARTS, help="all without it, except connectors (those of vLLM)"
    )
    parser.add_argument(
        "shapes",
        nargs="*",
        help=(
            f"of engines: {', '.join(SHAPES)}; of store: see harness/kv/store_checks.py; of"
            f" identity: {', '.join(identity_checks.MEDIA)}; of connectors: names"
        ),
    )
    parser.add_argument(
        "--requests",
        type=int,
        help="per check: 200 for engines, 500 for faults, 2000 prompts for requests",
    )
    parser.add_argument(
        "--restarts", type=int, default=50, help="of either instance in part requests"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, in engines and requests")
    given = parser.parse_args()
    wrong: list[str] = []
    if given.part == "connectors":
        in_tree.run(given.shapes)
    if given.part in (None, "engines"):
        wrong += engines(given.shapes, given.requests or 200, given.seed)
    if given.part in (None, "faults"):
        wrong += faults(given.requests or 500)
    if given.part in (None, "requests"):
        wrong += requests(given.requests or 2000, given.restarts, given.seed)
    if given.part in (None, "throughput"):
        wrong += throughput.compare(9, "npu") + throughput.compare(9)
    if given.part in (None, "store"):
        if given.shapes != ["faults"]:
            wrong += store_checks.engines(given.shapes, given.requests or 60)
        if given.shapes in ([], ["faults"]):
            wrong += store_checks.faults(given.requests or 500)
    if given.part in (None, "identity"):
        wrong += identity_checks.check(given.shapes)
    for line in wrong:
        print("WRONG", line)
    raise SystemExit(bool(wrong))
