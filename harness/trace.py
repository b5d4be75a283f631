# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launches, bytes and host waits of this process's steps, from the emulator's trace
(ASCEND_EMULATOR_TRACE)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ascend_emulator import tracing

TRACE = Path(os.environ["ASCEND_EMULATOR_TRACE"])
HOST_COPIES = {"aclrtMemcpy", "aclrtMemcpyBatch"}


def events() -> list[dict]:
    torch.npu.synchronize()
    tracing.flush()
    return [event for event in tracing.events(TRACE) if event["pid"] == os.getpid()]


def summary(step: list[dict]) -> dict[str, Any]:
    """One step's launches by name, bytes moved in memory and between NPUs, and number of host
    waits."""
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
    found = {"names": names, "moved": moved, "bytes": moved.total(), "sent": sum(sent)}
    return found | {"waits": sum(first < end < last for end in waits)}
