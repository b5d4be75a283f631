# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Traces of the emulated NPUs, and modelled device time (docs/modelled-times.md)."""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ascend_emulator import text_tables
from ascend_emulator.faults import loaded_library


@dataclass
class Estimate:
    """Modelled device time of an ``estimate()`` block, set at its end.

    Attributes:
        seconds: per NPU, of its latest stream, by the laws in ``laws.toml``.
    """

    seconds: dict[int, float] = field(default_factory=dict)


def flush() -> None:
    """Write this process's buffered events to the trace file; synchronize first. Done automatically
    at exit.

    Raises:
        RuntimeError: no NPU is emulated in this process.
    """
    loaded_library().ascend_emulator_flush_trace()


@contextmanager
def estimate() -> Iterator[Estimate]:
    """Model the device time of a block on all NPUs that this process uses; synchronizes at both
    ends.

    Streams overlap as events allow; the host takes the chip's launch time for each launch.

    Raises:
        RuntimeError: no NPU is emulated in this process.
    """
    import torch

    library = loaded_library()
    library.ascend_emulator_modelled.restype = ctypes.c_double
    npu = torch.npu
    current = npu.current_device()

    def at() -> dict[int, float]:
        devices = [
            device
            for device in range(npu.device_count())
            if device == current or library.ascend_emulator_modelled(device) > 0
        ]
        # In the second turn the host's clock has reached the last device's: all begin there.
        for device in devices * 2:
            npu.synchronize(device)
            library.ascend_emulator_align(device)
        return {device: library.ascend_emulator_modelled(device) for device in devices}

    result = Estimate()
    before = at()
    library.ascend_emulator_model(1)
    try:
        yield result
    finally:
        after = at()
        library.ascend_emulator_model(0)
        result.seconds = {
            device: seconds - before.get(device, 0.0) for device, seconds in after.items()
        }


def events(trace: Path) -> list[dict]:
    """Events of a trace file (``ASCEND_EMULATOR_TRACE``), whose JSON list is not closed, because
    its writers may be killed.

    A last line without its end is left out: another process may be writing it.

    Raises:
        ValueError: invalid trace file.
    """
    text = trace.read_text(errors="replace")
    if not text.rstrip().endswith("]"):
        text = text[: text.rfind("\n")].rstrip().removesuffix(",") + "]"
    try:
        trace_events = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{trace} is not a trace of the emulator: {error}") from None
    if not isinstance(trace_events, list) or not all(
        isinstance(event, dict) for event in trace_events
    ):
        raise ValueError(f"{trace} is not a trace of the emulator: it is no list of events")
    return [event for event in trace_events if event.get("ph") == "X"]


def table(trace: Path) -> str:
    """Summary of a trace by name: calls, bytes, FLOPs, time on the CPU or of the modelled clock, and
    modelled time on the chip."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    lawless: dict[str, int] = defaultdict(int)
    spent = "emulated ms"
    for event in events(trace):
        arguments = event["args"]
        size, flops, modelled = (arguments.get(key, 0) for key in ("bytes", "flops", "modelled_us"))
        if arguments.get("time"):
            spent = "timeline ms (modelled)"
        core = f", {arguments['core']}" if "core" in arguments else ""
        row = sums[event["cat"] + core, event["name"]]
        for column, value in enumerate((1, size, flops, event["dur"], modelled)):
            row[column] += value
        if arguments.get("law") == "":
            lawless[event["name"]] += 1
    head = ["kind", "name", "calls", "MB", "GFLOP", spent, "modelled ms"]
    rows = [
        [
            kind,
            name,
            f"{calls:.0f}",
            f"{size / 1e6:.2f}",
            f"{flops / 1e9:.3f}",
            f"{elapsed / 1e3:.2f}",
            f"{modelled / 1e3:.3f}",
        ]
        for (kind, name), (calls, size, flops, elapsed, modelled) in sorted(
            sums.items(), key=lambda item: -item[1][3]
        )
    ]
    note = (
        "Modelled times: by laws.toml, summed over streams (an estimate, not a measurement)."
        " Graphs contain operators."
    )
    named = ", ".join(f"{name} {calls}" for name, calls in sorted(lawless.items()))
    if named:
        note += f"\nOperators without a law, modelled as elementwise: {named}"
    return "\n".join([*text_tables.aligned(head, rows, names=2), "", note])
