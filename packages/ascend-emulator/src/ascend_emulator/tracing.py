"""What the emulated NPUs did: the table of a trace, and the time that a piece of a program would take by the roofline model."""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Estimate:
    """Estimated device time of the code within ``estimate()``, filled in at its end.

    Attributes:
        seconds: per NPU, on its busiest stream, with a host that is quick enough. An estimate from ``chips.toml``.
    """

    seconds: dict[int, float] = field(default_factory=dict)


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libascend_emulator.so", mode=ctypes.RTLD_GLOBAL | 4)  # RTLD_NOLOAD
    except OSError:
        raise RuntimeError("no NPU is emulated in this process; start it with: ascend-emulator run -- COMMAND") from None


def flush() -> None:
    """Write to the trace file what this process has done so far; synchronize first. At exit it is written by itself.

    Raises:
        RuntimeError: no NPU is emulated in this process.
    """
    _library().ascend_emulator_flush_trace()


@contextmanager
def estimate() -> Iterator[Estimate]:
    """Model the device time of what runs within, on all NPUs of this process that are in use; synchronizes at both ends.

    An operator takes the longer of its floating-point operations over its cores' throughput and its bytes over the memory's
    bandwidth, and a launch; collectives and copies their bytes over the links. Streams overlap as events allow.

    Raises:
        RuntimeError: no NPU is emulated in this process.
    """
    import torch

    library = _library()
    library.ascend_emulator_modelled.restype = ctypes.c_double
    npu = torch.npu
    current = npu.current_device()

    def at() -> dict[int, float]:
        found = {}
        for device in range(npu.device_count()):
            if device == current or library.ascend_emulator_modelled(device) > 0:
                npu.synchronize(device)
                library.ascend_emulator_align(device)
                found[device] = library.ascend_emulator_modelled(device)
        return found

    result = Estimate()
    before = at()
    library.ascend_emulator_model(1)
    try:
        yield result
    finally:
        after = at()
        library.ascend_emulator_model(0)
        result.seconds = {device: seconds - before.get(device, 0.0) for device, seconds in after.items()}


def events(trace: Path) -> list[dict]:
    """The events of a trace file (``ASCEND_EMULATOR_TRACE``); its list is left open, as its writers may be killed.

    Raises:
        ValueError: the file is no trace.
    """
    lines = trace.read_text().strip().removesuffix(",")
    try:
        found = json.loads(lines + ("" if lines.endswith("]") else "]"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{trace} is no trace of the emulator: {error}") from None
    return [event for event in found if event.get("ph") == "X"]


def table(trace: Path) -> str:
    """What a trace holds, by name: calls, bytes, floating-point operations, time on the CPU and estimated time on the chip."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for event in events(trace):
        arguments = event["args"]
        row = sums[event["cat"], event["name"]]
        for place, value in enumerate(
            (1, arguments.get("bytes", 0), arguments.get("flops", 0), event["dur"], arguments.get("estimated_us", 0))
        ):
            row[place] += value
    head = ["kind", "name", "calls", "MB", "GFLOP", "emulated ms", "estimated ms"]
    rows = [
        [kind, name, f"{calls:.0f}", f"{size / 1e6:.2f}", f"{flops / 1e9:.3f}", f"{emulated / 1e3:.2f}", f"{estimated / 1e3:.3f}"]
        for (kind, name), (calls, size, flops, emulated, estimated) in sorted(sums.items(), key=lambda item: -item[1][3])
    ]
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if place > 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    return "\n".join(
        [
            *lines,
            "",
            "Estimated times: roofline model, summed over streams: an estimate, no measurement. Graphs hold operators.",
        ]
    )
