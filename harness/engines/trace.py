# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launches, bytes, modelled times and host waits of this process's steps, from the emulator's trace
(ASCEND_EMULATOR_TRACE)."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ascend_emulator import tracing

TRACE = Path(os.environ["ASCEND_EMULATOR_TRACE"])
HOST_COPIES = {"aclrtMemcpy", "aclrtMemcpyBatch"}
MASK = "[2048, 2048]"
"""Shape of the compressed mask of causal attention."""


def events() -> list[dict]:
    torch.npu.synchronize()
    tracing.flush()
    return [event for event in tracing.events(TRACE) if event["pid"] == os.getpid()]


def summary(step: list[dict]) -> dict[str, Any]:
    """One step's launches by name, bytes moved in memory and between NPUs, modelled times, launches
    on the AI CPU, and number of host waits."""
    launched = [
        event
        for event in step
        if event["cat"] in ("operator", "copy", "collective") and event["name"] not in HOST_COPIES
    ]
    # An operator on tensors without elements launches no kernel.
    launched = [event for event in launched if event["cat"] != "operator" or event["args"]["bytes"]]
    launched.sort(key=lambda event: event["ts"])
    first = next(event["ts"] for event in launched if event["cat"] == "operator")
    # The sampled tokens' way to the host. The V2 runner updates its states behind it, and meanwhile
    # waits for the tokens.
    last = max(event["ts"] for event in launched if event["cat"] == "copy")
    waits = [
        event["ts"] + event["dur"]
        for event in step
        if event["cat"] == "synchronize" or event["name"] in HOST_COPIES
    ]
    sent = [event["args"].get("link", 0) for event in launched if event["cat"] == "collective"]
    moved: Counter[str] = Counter()
    for event in launched:
        if event["cat"] == "operator":
            moved[event["name"]] += event["args"]["bytes"]
    names = Counter(event["name"] for event in launched)
    modelled = Counter[str]()
    for event in launched:
        modelled[event["name"]] += event["args"]["modelled_us"]
    totals = {"names": names, "moved": moved, "bytes": moved.total(), "sent": sum(sent)}
    return totals | {
        "waits": sum(first < end < last for end in waits),
        "modelled": modelled,
        "exposed": exposed(launched),
        "masked": sum(map(_is_masked, launched)),
        "compilations": sum(event["cat"] == "compilation" for event in step),
        "ai_cpu": Counter(
            event["name"] for event in launched if event["args"].get("core") == "AI CPU"
        ),
    }


def _is_masked(event: dict) -> bool:
    """Whether an attention has a mask though each request has one query token: the first tensor has
    as many rows as the block table, the one tensor with two sizes of int32."""
    shapes = event["args"].get("shapes", "")
    tables = re.findall(r"Int\[(\d+), \d+\]", shapes)
    query = re.match(r"\w+\[(\d+),", shapes)
    is_attention = "Attention" in event["name"] and MASK in shapes
    return bool(is_attention and query and query[1] in tables)


def exposed(launched: list[dict]) -> float:
    """Modelled microseconds of collectives while the NPU does nothing else; 0 in a trace of another
    clock."""
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in launched:
        if event["args"].get("time") == "modelled":
            span = event["ts"], event["ts"] + event["dur"]
            spans[event["cat"] == "collective"].append(span)
    busy = _length(spans[False])
    return _length(spans[False] + spans[True]) - busy


def _length(spans: list[tuple[float, float]]) -> float:
    """Of the union of these spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
