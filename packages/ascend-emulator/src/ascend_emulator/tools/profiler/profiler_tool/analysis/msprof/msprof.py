# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program ``msprof`` of ``ascend-emulator run``: ``--export=on --output=PROF_…`` makes timeline and
op_summary of a profile.

torch_npu's profiler calls it, and looks for this path beside it. Durations are those of this
machine's CPU, or those of the modelled clock (`--time modelled`), and then marked. It runs with any
``python3`` on PATH, and so imports nothing of this package.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

USAGE = (
    "usage: msprof --export=on --output=DIR    (of a profile of the emulator; DIR is PROF_… or"
    " holds such directories)"
)
OUTPUT = "mindstudio_profiler_output"
TASKS = {"operator": "AI_CORE", "collective": "COMMUNICATION", "copy": "MEMCPY_ASYNC"}
DTYPES = {
    "Half": "FLOAT16",
    "BFloat16": "DT_BF16",
    "Float": "FLOAT",
    "Int": "INT32",
    "Long": "INT64",
    "Bool": "BOOL",
    "Char": "INT8",
}
SUMMARY = (
    "Device_id,Model ID,Task ID,Stream ID,Op Name,OP Type,OP State,Task Type,Task Start Time(us),"
    "Task Duration(us),Task Wait Time(us),Block Num,Input Shapes,Input Data Types,Input Formats"
)
STATISTIC = "Device_id,OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)"
"""Head lines of the tables."""


def tasks(profile: Path) -> list[dict]:
    """The tasks of a profile with local times in µs as text, which torch_npu compares digit by
    digit."""
    info = json.loads((profile / "host" / "start_info").read_text())
    # nanoseconds
    begin, steady = int(info["collectionTimeBegin"].replace(".", "")), int(info["clockMonotonic"])

    def local(microseconds: float) -> str:
        whole = begin + round(microseconds * 1000) - steady
        return f"{whole // 1000}.{whole % 1000:03}"

    lines = (profile / "host" / "emulator_trace.json").read_text().splitlines()
    events = [json.loads(line.rstrip(",")) for line in lines if line.endswith("},")]
    events = [event for event in events if event.get("cat") in TASKS and "stream" in event["args"]]
    # A modelled timeline begins after the last call on the host, whose times are this machine's.
    shift = 0.0
    if is_modelled(events):
        first = min(event["ts"] for event in events)
        shift = max([steady / 1000, *(each["args"].get("called", 0) for each in events)]) - first
    for event in events:
        if shift:  # torch_npu counts what begins at the end of a step to that step.
            event["dur"] = max(event["dur"] - 0.001, 0.0)
        event["start"] = local(event["ts"] + shift)
        event["called"] = local(event["args"].get("called", event["ts"] + shift))
    return sorted(events, key=lambda event: event["ts"])


def is_modelled(events: list[dict]) -> bool:
    """Whether the times are modelled ones."""
    return any(event["args"].get("time") == "modelled" for event in events)


def core(event: dict) -> str:
    """Where a task runs, marked where its time is modelled."""
    name = "AI_CPU" if "core" in event["args"] else TASKS[event["cat"]]
    return f"{name} (modelled)" if is_modelled([event]) else name


def operator(name: str) -> str:
    """``Add`` of ``aclnnAdd``."""
    return re.sub(r"^(aclnn|Atb|atb::)", "", name)


def timeline(events: list[dict]) -> list[dict]:
    """Chrome trace: the streams, the calls on the host, and an arrow from each call to its task."""
    pid = events[0]["pid"] if events else 0
    host, device = pid * 100 + 1, pid * 100 + 2
    mark = " (modelled)" if is_modelled(events) else ""
    names = [(host, "CANN"), (device, f"Ascend Hardware{mark}")]
    trace: list[dict] = [
        {"name": "process_name", "ph": "M", "pid": at, "tid": 0, "args": {"name": name}}
        for at, name in names
    ]
    for number, event in enumerate(events):
        arguments = event["args"]
        task = {
            "Task Type": core(event),
            "Stream Id": arguments["stream"],
            "Task Id": number,
        }
        at = {"pid": device, "tid": arguments["stream"], "ts": event["start"]}
        trace.append({"name": event["name"], "ph": "X", **at, "dur": event["dur"], "args": task})
        flow = {"name": f"HostToDevice{number}", "cat": "HostToDevice", "id": str(number)}
        trace.append({**flow, "ph": "s", "pid": host, "tid": 0, "ts": event["called"]})
        trace.append({**flow, "ph": "f", "bp": "e", **at})
    return trace


def summary(events: list[dict]) -> list[list]:
    """Rows of op_summary. The input shapes are those of all arguments, outputs last."""
    rows: list[list] = []
    ends: dict[int, float] = {}
    for number, event in enumerate(events):
        arguments = event["args"]
        stream = arguments["stream"]
        waited = max(0.0, event["ts"] - ends.get(stream, event["ts"]))
        ends[stream] = event["ts"] + event["dur"]
        if event["cat"] == "copy":
            continue
        tensors = re.findall(r"(\w+)\[([\d, ]*)\]", arguments.get("shapes", ""))
        shapes = ";".join(sizes.replace(" ", "") for _, sizes in tensors)
        dtypes = ";".join(DTYPES.get(dtype, dtype.upper()) for dtype, _ in tensors)
        name = event["name"]
        row = [arguments["npu"], 4294967295, number, stream, name, operator(name), "static"]
        row += [core(event), event["start"], f"{event['dur']:.3f}", f"{waited:.3f}", 0]
        rows.append([*row, f'"{shapes}"', dtypes, ";".join("ND" for _ in tensors)])
    return rows


def export(profile: Path) -> None:
    events = tasks(profile)
    output = profile / OUTPUT
    output.mkdir(exist_ok=True, mode=0o750)
    stamp = re.sub(r"\D", "", profile.name.split("_")[2])[:14]
    (output / f"msprof_{stamp}.json").write_text(json.dumps(timeline(events)))
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (output / f"op_summary_{stamp}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        file.write(f"{SUMMARY}\r\n")
        for row in summary(events):
            writer.writerow(row)
            kinds[row[5], row[7]].append(float(row[9]))
    whole = sum(map(sum, kinds.values())) or 1.0
    with (output / f"op_statistic_{stamp}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        file.write(f"{STATISTIC}\r\n")
        for (kind, core), times in sorted(kinds.items(), key=lambda each: -sum(each[1])):
            total = sum(times)
            figures = total, min(times), total / len(times), max(times), 100 * total / whole
            writer.writerow([0, kind, core, len(times), *(f"{figure:.3f}" for figure in figures)])


def main(arguments: list[str]) -> int:
    parts = (argument.lstrip("-").partition("=") for argument in arguments)
    options = {name: value for name, _, value in parts}
    if "help" in options or not arguments:
        print(USAGE)
        return 0
    if options.get("analyze") == "on":
        return 0  # Columns of links between NPUs, which are not modelled.
    is_text = options.get("type", "text") == "text"
    if options.get("export") != "on" or not is_text or not options.get("output"):
        print(f"msprof of ascend-emulator cannot {' '.join(arguments)}; {USAGE}", file=sys.stderr)
        return 2
    root = Path(options["output"])
    profiles = [root] if root.name.startswith("PROF_") else sorted(root.glob("PROF_*"))
    profiles = [each for each in profiles if (each / "host" / "emulator_trace.json").exists()]
    if not profiles:
        print(f"msprof of ascend-emulator: no profile of the emulator in {root}", file=sys.stderr)
        return 1
    for profile in profiles:
        export(profile)
    # torch_npu looks for the files every 0.1 s, and gives up where this process has ended before.
    time.sleep(0.3)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
