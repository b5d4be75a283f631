# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""NPUs, driver, CANN and memory of this machine, found without importing torch, torch_npu or vLLM
and without opening an NPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ascend_platform import chips

DRIVER = Path("/usr/local/Ascend/driver")
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
"""Environment variable with the NPUs that a process may use."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
REUSE_STREAMS = {"CANN": (8, 5, 0), "driver": (25, 5, 1)}
"""Versions since which the streams of captured graphs are reused (vllm-project/vllm-ascend, pull
requests 9962 and 10555)."""
_DRIVER_PACKAGE, _VERSION_BYTES = 7, 512
"""Of CANN's ``aclCANNPackageName``, and the size of its ``aclCANNPackageVersion``."""
# Runs in a separate process: loading CANN starts threads, and a broken installation may end the
# process. It opens no device.
_QUESTIONS = """
import ctypes
def npus():
    count = ctypes.c_int(-1)
    status = ctypes.CDLL("libascend_hal.so").drvGetDevNum(ctypes.byref(count))
    if status:
        raise OSError(f"drvGetDevNum returned {status}")
    return count.value
def chip():
    name = ctypes.CDLL("libascendcl.so").aclrtGetSocName
    name.restype = ctypes.c_char_p
    return (name() or b"").decode()
def driver():
    version = ctypes.create_string_buffer(512)
    return "" if ctypes.CDLL("libascendcl.so").aclsysGetCANNVersion(7, version) else version.value.decode()
for question in (npus, chip, driver):
    try:
        print(question.__name__, question(), sep="=", flush=True)
    except (OSError, AttributeError) as error:
        print(question.__name__, "?", " ".join(str(error).split()), sep="=", flush=True)
"""


def package(name: str) -> Path | None:
    """The directory of an installed package; does not import it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def missing_library(error: BaseException | None) -> str:
    """The missing library and the fix, if an error or its cause is that torch_npu lacks a library
    of CANN; else ""."""
    for each in error_chain(error):
        name, _, rest = str(each).partition(": ")
        is_missing = isinstance(each, ImportError) and "cannot open shared object file" in rest
        if is_missing and through_torch_npu(each):
            return (
                f"CANN's library {name} was not found, so torch_npu cannot be loaded; fix: source"
                " CANN's set_env.sh (usually /usr/local/Ascend/ascend-toolkit/set_env.sh), or use"
                " ascend-emulator run on a machine without NPUs"
            )
    return ""


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its cause or context, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def through_torch_npu(error: BaseException) -> bool:
    """Whether the error's traceback passes through torch_npu."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "torch_npu":
            return True
        traceback = traceback.tb_next
    return False


@functools.cache
def query_driver() -> dict[str, str]:
    """Answers of the driver and CANN's runtime: ``npus`` and ``chip``; a value that begins with
    "?=" is an error."""
    command, env = [sys.executable, "-I", "-S", "-c", _QUESTIONS], _with_torch()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {"npus": "?=no answer from the driver in 20 seconds"}
    answers = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {"npus": f"?=asking the driver ended with status {done.returncode}"} | answers


def npu_count() -> tuple[int, str]:
    """The number of NPUs, regardless of ASCEND_RT_VISIBLE_DEVICES, and the driver's error, or
    ""."""
    answer = query_driver()["npus"]
    if not answer.startswith("?="):
        return int(answer), ""
    return sum(path.name[7:].isdigit() for path in Path("/dev").glob("davinci*")), answer[2:]


def visible(listed: str, npus: int) -> int:
    """How many of ``npus`` NPUs torch_npu uses with a value of ASCEND_RT_VISIBLE_DEVICES.

    The list ends at the first character that is neither digit nor comma, and at an id that is too
    large; ids must ascend.
    """
    ids: list[int] = []
    for word in re.split(r"[^\d,]", listed)[0].split(","):
        if not word or int(word) >= npus:
            break
        if ids and int(word) <= ids[-1]:
            return 0
        ids.append(int(word))
    return len(ids)


def unused_npus(listed: str, npus: int) -> tuple[str, str]:
    """The error in a value of ASCEND_RT_VISIBLE_DEVICES and the command that corrects it; "" if it
    is valid."""
    usable = visible(listed, npus)
    if usable == len(listed.split(",")):
        return "", ""
    ids = sorted({int(word) for word in re.findall(r"\d+", listed) if int(word) < npus})
    fix = f"export {VISIBLE_NPUS}={','.join(map(str, ids))}" if ids else f"unset {VISIBLE_NPUS}"
    rule = f"ids must be 0 to {npus - 1}, ascending, without spaces"
    return f"{listed!r} leaves {usable} of {npus} NPUs: {rule}", fix


def has_numa_nodes(online: Path = Path("/sys/devices/system/node/online")) -> bool:
    """Whether this machine has several NUMA nodes, by the kernel."""
    try:
        return online.read_text().strip() not in ("", "0")
    except OSError:
        return False


class NPUPlace(NamedTuple):
    """Where an NPU is on its machine.

    Attributes:
        bus: its PCI address, which is the same in all containers.
        node: its NUMA node.
        position: that among the NPUs of this node by their PCI addresses, visible or not.
        npus: number of these NPUs.
    """

    bus: str
    node: int
    position: int
    npus: int


def npu_places(
    devices: Path = PCI_DEVICES, listing: str | None = None
) -> tuple[list[NPUPlace], str]:
    """The place of each visible NPU, or none and the reason why they are unknown.

    npu-smi tells the NPUs' PCI addresses, and the kernel the NUMA nodes of these, and which other
    devices of the machine have their vendor and model: npu-smi in a container has only the NPUs of
    the container.

    Args:
        devices: the kernel's directory of PCI devices.
        listing: output of ``npu-smi info``; None runs it.
    """
    if listing is None:
        try:
            done = subprocess.run(
                ["npu-smi", "info"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            return [], f"npu-smi info failed ({' '.join(str(error).split())})"
        listing = done.stdout
    # The second line of each NPU: number of the chip, number of the device, PCI address.
    all_buses = re.findall(
        r"^\|\s*\d+(?:\s+\d+)?\s*\|\s*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*\|",
        listing,
        re.M,
    )
    buses, listed = all_buses, os.environ.get(VISIBLE_NPUS)
    if listed is not None:
        count = visible(listed, len(buses))
        buses = [buses[int(index)] for index in listed.split(",")[:count]] if count else []
    if not buses:
        return [], "npu-smi info shows no visible NPU with its PCI address"
    node_of = functools.cache(lambda bus: _numa_node(devices / bus))
    buses, npus = [*map(str.lower, buses)], {*map(str.lower, all_buses)}
    if unknown := [bus for bus in buses if node_of(bus) < 0]:
        return [], f"the kernel does not know the NUMA node of the NPU at {unknown[0].upper()}"
    kinds = {path.name: _pci_kind(path) for path in devices.iterdir()}
    places = []
    for bus in buses:
        same = {each for each, kind in kinds.items() if kind and kind == kinds.get(bus)}
        of_node = sorted(each for each in same | npus if node_of(each) == node_of(bus))
        places.append(NPUPlace(bus, node_of(bus), of_node.index(bus), len(of_node)))
    return places, ""


def _numa_node(device: Path) -> int:
    """The NUMA node of a PCI device; -1, which is the kernel's value too, if it is unknown."""
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _pci_kind(device: Path) -> tuple[str, str] | None:
    """Vendor and model of a PCI device."""
    try:
        return (device / "vendor").read_text(), (device / "device").read_text()
    except OSError:
        return None


def node_cores(node: int, nodes: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The cores of a NUMA node, ascending; none if they are unknown. The kernel lists ranges:
    ``0-3,8``."""
    try:
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        bounds = [tuple(map(int, each.split("-"))) for each in ranges]
    except (OSError, ValueError):
        return []
    return [core for each in bounds for core in range(each[0], each[-1] + 1)]


def chip() -> str:
    """The chip's name, or "" if it is unknown."""
    try:
        name = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD).aclrtGetSocName
    except (OSError, AttributeError):  # torch_npu is not loaded in this process.
        return query_driver().get("chip", "?=").partition("?=")[0]
    name.restype = ctypes.c_char_p
    return (name() or b"").decode()


def chip_family() -> chips.ChipFamily:
    """The capabilities of this machine's chip; see ``chips.py``."""
    return chips.family_of(chip())


def cann_home() -> Path | None:
    """CANN's directory according to the variables that set_env.sh sets."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    return Path(home) if home else None


def cann_version() -> str:
    """CANN's version from the files of its installation, or ""."""
    home = cann_home()
    if home is None:
        return ""
    directories = [home, home / f"{platform.machine()}-linux"]
    patterns = "*_install.info", "*/version.info"
    files = [sorted(folder.glob(each)) for folder in directories for each in patterns]
    return next(filter(None, map(_version_in, itertools.chain(*files))), "")


def driver_version() -> str:
    """The driver's version from its version file, else from CANN's runtime: containers may lack the
    file. "" if it is unknown."""
    if found := _version_in(DRIVER / "version.info"):
        return found
    try:
        ask = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD).aclsysGetCANNVersion
    except (OSError, AttributeError):  # torch_npu is not loaded in this process.
        return query_driver().get("driver", "?=").partition("?=")[0]
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    return "" if ask(_DRIVER_PACKAGE, version) else version.value.decode()


def reuses_streams() -> bool:
    """Whether CANN reuses the streams of captured graphs, so that their number is not limited; no
    where a version is unknown."""
    versions = (cann_version(), REUSE_STREAMS["CANN"]), (driver_version(), REUSE_STREAMS["driver"])
    return all(_numbers(found) >= least for found, least in versions)


def firmware_version() -> str:
    """The firmware's version from its version file, or ""."""
    return _version_in(DRIVER.with_name("firmware") / "version.info")


def _with_torch() -> dict[str, str]:
    """This environment with torch's libraries on LD_LIBRARY_PATH, as torch_npu is loaded after
    torch."""
    torch = package("torch")
    parts = [os.environ.get("LD_LIBRARY_PATH", ""), str(torch / "lib") if torch else ""]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, parts))}


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version such as 25.5.1 or 24.1.rc3, where a release candidate is
    before the release."""
    parts = (*version.split("."), "0", "0", "0")[:3]
    return tuple(int(part) if part.isdigit() else -1 for part in parts)


def _version_in(path: Path) -> str:
    try:
        found = re.search(r"(?im)^\s*version\s*=\s*(\S+)", path.read_text(errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""
