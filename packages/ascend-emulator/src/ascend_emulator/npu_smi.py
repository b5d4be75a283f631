# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program ``npu-smi`` of ``ascend-emulator run``: ``info``, ``info -l``, ``info -m`` and ``info -t``
with the topics that public projects ask for.

The layout is that of npu-smi 25 for one chip per NPU. Usages, temperatures and processes are not
known, and are 0. It runs with any ``python3`` on PATH, and so imports nothing of this package.
"""

from __future__ import annotations

import os
import sys

# Of the driver, where --driver does not say which: one that goes with CANN 9.1, and whose graphs hold
# streams, as those of the library do then.
VERSION = os.environ.get("ASCEND_EMULATOR_DRIVER") or "25.5.0"
TOPICS = (
    *("board", "common", "health", "memory", "power", "proc-mem", "temp", "topo"),
    "usages",
)
WIDE, THREE = "+" + "-" * 96 + "+", "+" + "+".join("-" * width for width in (27, 15, 52)) + "+"


def _rows(pairs: list[tuple[str, object]]) -> str:
    return "\n".join(f"\t{name.ljust(31)}: {value}" for name, value in pairs)


def _cells(*texts: str) -> str:
    return "|" + "|".join(f" {text}".ljust(width) for text, width in zip(texts, (27, 15, 52))) + "|"  # noqa: B905


def overview(npus: int, name: str, memory: int) -> str:
    """The table of ``npu-smi info``."""
    double = THREE.replace("-", "=")
    lines = [WIDE, f"| npu-smi {VERSION}".ljust(35) + f"Version: {VERSION}".ljust(62) + "|", THREE]
    lines += [
        _cells("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)"),
        _cells("Chip", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)"),
        double,
    ]
    for npu in range(npus):
        lines += [
            _cells(f"{npu:<6}{name}", "OK", f"{0.0:<12}{0:<18}0    / 0"),
            _cells("0", f"0000:{npu + 1:02X}:00.0", f"{0:<12}{'0    / 0':<18}{0:<5}/ {memory}"),
            double,
        ]
    lines += [
        THREE,
        "| NPU     Chip".ljust(28)
        + "| Process id    | Process name             | Process memory(MB)      |",
        double,
    ]
    for npu in range(npus):
        lines += [f"| No running processes found in NPU {npu}".ljust(97) + "|", double]
    return "\n".join(lines)


def listing(npus: int) -> str:
    """``npu-smi info -l``."""
    parts = [_rows([("Total Count", npus)])]
    parts += [_rows([("NPU ID", npu), ("Chip Count", 1)]) for npu in range(npus)]
    return "\n\n".join(parts)


def mapping(npus: int, name: str) -> str:
    """``npu-smi info -m``: NPU, chip, logical number and name."""
    rows = [
        ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"),
        *((str(npu), "0", str(npu), f"Ascend {name}") for npu in range(npus)),
    ]
    return "\n".join("\t" + "".join(cell.ljust(31) for cell in row).rstrip() for row in rows)


def topology(npus: int, soc: str) -> str:
    """``npu-smi info -t topo``: the links between NPUs, and the CPUs, which are all near."""
    link = "HCCS" if soc.startswith(("Ascend910B", "Ascend910_93")) else "SYS"
    cpus = sorted(os.sched_getaffinity(0))
    ranges, first = [], cpus[0]
    for cpu, after in zip(cpus, [*cpus[1:], -1]):  # noqa: B905
        if after != cpu + 1:
            ranges.append(str(cpu) if cpu == first else f"{first}-{cpu}")
            first = after
    names = [f"NPU{npu}" for npu in range(npus)]
    rows = [["", *names, "CPU Affinity"]]
    for name in names:
        rows.append([name, *("X" if other == name else link for other in names), ",".join(ranges)])
    lines = ["".join(cell.ljust(11) for cell in row).rstrip() for row in rows]
    legend = (
        "Legend:",
        "  X    = Self",
        "  SYS  = Path traversing PCIe and the interconnect between NUMA nodes",
        "  HCCS = Connection traversing HCCS",
    )
    return "\n".join([*lines, "", *legend])


def topic(what: str, npu: int, name: str, memory: int) -> str:
    """``npu-smi info -t WHAT -i NPU``."""
    head: list[tuple[str, object]] = [("NPU ID", npu)]
    if what == "board":
        rows = [
            ("Product Name", "emulated"),
            ("Manufacturer", "ascend-emulator"),
            ("Software Version", VERSION),
            ("Firmware Version", VERSION),
            ("Compatibility", "OK"),
            ("PCIe Bus Info", f"0000:{npu + 1:02X}:00.0"),
            ("Chip Name", name),
        ]
        return _rows([*head, *rows, ("Chip Count", 1)])
    rates = [(f"{unit} Usage Rate(%)", 0) for unit in ("Memory", "HBM", "Aicore")]
    temperature, power = ("Temperature(C)", 0), ("NPU Real-time Power(W)", "0.0")
    chip: dict[str, list[tuple[str, object]]] = {
        "common": [("Chip ID", 0), *rates, temperature, power],
        "health": [
            ("Health Status", "OK"),
            ("Error Code", "NA"),
            ("Error Information", "NA"),
            ("Chip ID", 0),
        ],
        "power": [power, ("Chip ID", 0)],
        "temp": [("NPU Temperature (C)", 0), ("Chip ID", 0)],
    }
    if what == "proc-mem":
        return f"{_rows([*head, ('Chip Count', 1)])}\n\n\tNo process in device.\n{_rows([('Chip ID', 0)])}"
    if what in chip:
        return _rows([*head, ("Chip Count", 1)]) + "\n\n" + _rows(chip[what])
    rows = [("DDR Capacity(MB)", "0"), ("HBM Capacity(MB)", str(memory))]
    if what == "usages":
        units = ("DDR", "HBM", "Aicore", "Aivector", "Aicpu", "Ctrlcpu")
        rows += [(f"{unit} Usage Rate(%)", "0") for unit in units] + [("NPU Utilization(%)", "0")]
    return _rows([*head, ("Chip Count", 1)]) + "\n\n" + _rows([*rows, ("Chip ID", 0)])


def main(arguments: list[str]) -> int:
    """Print the requested query; other queries are refused in one line."""
    npus = int(os.environ.get("ASCEND_EMULATOR_NPUS", "0"))
    if not npus:
        print(
            "npu-smi: no NPU is emulated in this process; start it with: ascend-emulator run --"
            " COMMAND",
            file=sys.stderr,
        )
        return 1
    name = os.environ["ASCEND_EMULATOR_SOC"].replace("Ascend", "", 1)
    memory = int(os.environ["ASCEND_EMULATOR_MEMORY"]) >> 20
    if arguments in (["-v"], ["--version"]):
        print(f"npu-smi version: {VERSION}")
    elif arguments == ["info"]:
        print(overview(npus, name, memory))
    elif arguments == ["info", "-l"]:
        print(listing(npus))
    elif arguments == ["info", "-m"]:
        print(mapping(npus, name))
    else:
        flags = dict(zip(arguments[1::2], arguments[2::2]))  # noqa: B905
        npu, chip = flags.get("-i", "0"), flags.get("-c", "0")
        if (
            arguments[:1] != ["info"]
            or flags.keys() - {"-t", "-i", "-c"}
            or flags.get("-t") not in TOPICS
        ):
            print(
                f"npu-smi: {' '.join(arguments) or 'no query'} is not emulated; supported: info,"
                f" info -l, info -m, info -t {'|'.join(TOPICS)} -i NPU",
                file=sys.stderr,
            )
            return 1
        if flags["-t"] == "topo":
            print(topology(npus, os.environ["ASCEND_EMULATOR_SOC"]))
            return 0
        if not npu.isdigit() or int(npu) >= npus:
            print(
                f"npu-smi: there is no NPU {npu}; NPUs: 0 to {npus - 1}; fix: ascend-emulator run"
                " --npus, with more",
                file=sys.stderr,
            )
            return 1
        if chip != "0":
            print(f"npu-smi: NPU {npu} has no chip {chip}; chips: 0", file=sys.stderr)
            return 1
        print(topic(flags["-t"], int(npu), name, memory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
