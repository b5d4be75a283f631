"""What the doctor says of environment variables: those that vLLM, CANN and HCCL read, and those that nothing reads."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator

from ascend_platform import extension, host

# What CANN, HCCL, torch_npu and the container runtime document; others may be meant for other software.
_ASCEND = """
AICPU_PATH CACHE_PATH COREDUMP_SIGNAL CUSTOM_OPP_PATH DEVICE_ID DOCKER_RUNTIME DRIVER_PATH DUMP_PATH DUMP_SCENE
ENHANCE_ENABLE GLOBAL_EVENT_ENABLE GLOBAL_LOG_LEVEL HOME_PATH HOST_LOG_FILE_NUM INSTALL_PATH LATEST_INSTALL_PATH
LAUNCH_BLOCKING LOG_DEVICE_FLUSH_TIMEOUT LOG_SAVE_MODE MAX_OP_CACHE_SIZE MODULE_LOG_LEVEL NNAE_PATH OPP_DEBUG_PATH
OPP_PATH PROCESS_LOG_PATH PROFILER PROFILER_OUTPUT REMAIN_CACHE_SIZE_RATIO RT_VISIBLE_DEVICES RUNTIME_OPTIONS
SLOG_PRINT_TO_STDOUT TENSOR_COMPILER_INCLUDE TOOLKIT_HOME VISIBLE_DEVICES WORK_PATH
"""
_HCCL = """
ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CONCURRENT_ENABLE CONNECT_TIMEOUT DEBUG_CONFIG DESYNC_DEBUG
DETERMINISTIC DFS_CONFIG DIAGNOSE_ENABLE ENTRY_LOG_ENABLE EVENT_TIMEOUT EXEC_TIMEOUT HOST_SOCKET_PORT_RANGE
IF_BASE_PORT IF_IP INTER_HCCS_DISABLE INTRA_PCIE_ENABLE INTRA_ROCE_ENABLE LOGIC_SUPERPOD_ID MULTI_QP_THRESHOLD
NPU_SOCKET_PORT_RANGE OP_EXPANSION_MODE OP_RETRY_ENABLE OP_RETRY_PARAMS RDMA_PCIE_DIRECT_POST_NOSTRICT
RDMA_QPS_PER_CONNECTION RDMA_RETRY_CNT RDMA_SL RDMA_TC RDMA_TIMEOUT SOCKET_FAMILY SOCKET_IFNAME SO_PATH
WHITELIST_DISABLE WHITELIST_FILE
"""
KNOWN = {*(f"ASCEND_{name}" for name in _ASCEND.split()), *(f"HCCL_{name}" for name in _HCCL.split())}
Line = tuple[str, str, str, str]


def target_device() -> Iterator[Line]:
    """vLLM reads VLLM_TARGET_DEVICE when it runs, too: cpu chooses the CPU before any plugin is asked."""
    if value := os.environ.get("VLLM_TARGET_DEVICE"):
        state, why = ("fail", "makes vLLM use the CPU") if value == "cpu" else ("warn", "is for building vLLM alone")
        yield "VLLM_TARGET_DEVICE", state, f"{value!r} {why}", "unset VLLM_TARGET_DEVICE"


def plugin_names(known: set[str]) -> Iterator[Line]:
    """VLLM_PLUGINS is not trimmed by vLLM, and a name that no plugin has is passed over in silence."""
    value = os.environ.get("VLLM_PLUGINS")
    if value is None:
        yield "VLLM_PLUGINS", "ok", "not set: every plugin loads", ""
        return
    names = [name for word in value.split(",") if (name := word.strip())]
    near = {name: (difflib.get_close_matches(name, known, n=1, cutoff=0.8) or [""])[0] for name in names if name not in known}
    mended = dict.fromkeys(filter(None, ["ascend", *(near.get(name, name) for name in names)]))
    fix = f"export VLLM_PLUGINS={','.join(mended)}"
    if not names:
        yield "VLLM_PLUGINS", "fail", f"{value!r} lets no plugin load", "unset VLLM_PLUGINS"
    elif any(word != word.strip() for word in value.split(",")):
        yield "VLLM_PLUGINS", "fail", f"{value!r} has blanks, which vLLM takes as part of the names", fix
    elif near:
        yield "VLLM_PLUGINS", "warn" if "ascend" in names else "fail", f"no plugin has the name {', '.join(near)}", fix
    elif "ascend" not in names:
        yield "VLLM_PLUGINS", "fail", f"{value!r} leaves out ascend, without which vLLM finds no NPU", fix
    else:
        yield "VLLM_PLUGINS", "ok", value, ""


def unknown() -> Iterator[Line]:
    """Variables of vLLM's that the installed vLLM does not read, and of CANN's that look like a slip of the pen."""
    vllm = _read_by_vllm()
    for name in sorted(os.environ):
        known = vllm if name.startswith("VLLM_") else KNOWN
        if name in known or not known or not name.startswith(("VLLM_", "ASCEND_", "HCCL_")):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            yield name, "warn", f"nothing reads it; {near[0]} is read", f"export {near[0]}=${name}; unset {name}"
        elif name.startswith("VLLM_"):
            yield name, "warn", "the installed vLLM does not read it", f"unset {name}"


def interfaces() -> Iterator[Line]:
    """Whether the addresses and interfaces that HCCL and vLLM are told to use are this machine's."""
    for name in ("HCCL_IF_IP", "VLLM_HOST_IP"):
        if value := os.environ.get(name):
            problem = _not_ours(value)
            fix = f"unset {name}, or set one of: ip -brief address"
            yield name, "fail" if problem else "ok", f"{value}{problem}", fix if problem else ""
    present = [name for _, name in socket.if_nameindex()]
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := os.environ.get(name):
            chosen = _chosen(value, present, exact=name.startswith("GLOO"))
            found = f"{value}: {', '.join(chosen) or 'no such interface'}; there are {', '.join(present)}"
            yield name, "ok" if chosen else "fail", found, "" if chosen else f"unset {name}, or set one of: ip -brief link"


def _chosen(value: str, present: list[str], exact: bool) -> list[str]:
    """HCCL's grammar: beginnings of names; ``=`` in front means whole names and ``^`` all but these."""
    excluded, names = value.startswith("^"), value.removeprefix("^")
    exact, words = exact or names.startswith("="), names.removeprefix("=").split(",")
    named = [one for one in present if any(one == word if exact else one.startswith(word) for word in words)]
    return [one for one in present if (one in named) != excluded]


def _not_ours(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return " is no address"
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((value, 0))
    except OSError:
        return " is no address of this machine"
    return ""


def _read_by_vllm() -> set[str]:
    """The names in vLLM's own table of variables, read from its source; empty if vLLM is not there."""
    vllm = host.package("vllm")
    table = vllm / "envs.py" if vllm else None
    if table is None or not table.is_file():
        return set()
    return {*re.findall(r'^    "(VLLM_\w+)":', table.read_text(), re.MULTILINE), *extension.VARIABLES}
