# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program ``npu-smi`` of ``ascend-emulator run``: ``info``, ``info -l``, ``info -m`` and ``info -t
board|memory|usages``.

The layout is that of npu-smi 25 for one chip per NPU. Usages and processes are not known across
processes, and are 0. It runs with any ``python3`` on PATH, and so imports nothing of this package.
"""

from __future__ import annotations

import os
import sys

VERSION = "25.2.0"
TOPICS = ("board", "memory", "usages")
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


def topic(what: str, npu: int, name: str, memory: int) -> str:
    """``npu-smi info -t WHAT -i NPU``."""
    head: list[tuple[str, object]] = [("NPU ID", npu)]
    if what == "board":
        rows = [
            ("Product Name", "emulated"),
            ("Manufacturer", "ascend-emulator"),
            ("Software Version", VERSION),
            ("Chip Name", name),
        ]
        return _rows([*head, *rows, ("Chip Count", 1)])
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
        npu = flags.get("-i", "0")
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
        if not npu.isdigit() or int(npu) >= npus:
            print(f"npu-smi: there is no NPU {npu}; NPUs: 0 to {npus - 1}", file=sys.stderr)
            return 1
        print(topic(flags["-t"], int(npu), name, memory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
