# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of environment variables: those that vLLM, CANN and HCCL read, and those that nothing
reads."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterator

from ascend_platform.extension import did_you_mean, installation

from ascend_cli.diagnostics import checks
from ascend_cli.result import Result, expect, fail, ok, warn

# Documented by CANN, HCCL, torch_npu and the container runtime; other names may belong to other
# software.
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
KNOWN = {
    *(f"ASCEND_{name}" for name in _ASCEND.split()),
    *(f"HCCL_{name}" for name in _HCCL.split()),
}


def target_device() -> Iterator[Result]:
    if problem := checks.target_device():
        uses_cpu = os.environ[checks.TARGET_DEVICE] == "cpu"
        yield (fail if uses_cpu else warn)(checks.TARGET_DEVICE, *problem)


def plugin_filter(known: set[str]) -> Iterator[Result]:
    """VLLM_PLUGINS: vLLM does not trim its names, and ignores names that no plugin has.

    Args:
        known: names of all installed plugins of vLLM.
    """
    filtered = installation.PluginFilter.current()
    if wrong := filtered.problem(known):
        problem, platform_is_off = wrong
        yield (fail if platform_is_off else warn)(installation.PLUGINS_VARIABLE, *problem)
    else:
        unset = "not set: all plugins load"
        yield ok(installation.PLUGINS_VARIABLE, unset if filtered.value is None else filtered.value)


def unknown() -> Iterator[Result]:
    """Variables named VLLM_… that the installed vLLM does not read, and likely typos of CANN's and
    HCCL's variables."""
    vllm = _read_by_vllm()
    for name in sorted(os.environ):
        known = vllm if name.startswith("VLLM_") else KNOWN
        if name in known or not known or not name.startswith(("VLLM_", "ASCEND_", "HCCL_")):
            continue
        if near := did_you_mean(name, known, cutoff=0.85):
            found = f"a likely typo of {near}; nothing reads it"
            yield warn(name, found, f"export {near}=${name}; unset {name}")
        elif name.startswith("VLLM_"):
            found = "the installed vLLM does not read it"
            if name.startswith("VLLM_ASCEND_"):
                found = "one of vllm-ascend's; these wheels do not read it"
            yield warn(name, found, f"unset {name}")


def interfaces() -> Iterator[Result]:
    """Whether the addresses and interfaces set for HCCL and vLLM exist on this machine."""
    for name in ("HCCL_IF_IP", "VLLM_HOST_IP"):
        if value := os.environ.get(name):
            fix = f"unset {name}, or set one of: ip -brief address"
            problem = _address_problem(value)
            yield expect(name, value, problem and f"{value} {problem}", fix)
    present = [name for _, name in socket.if_nameindex()]
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := os.environ.get(name):
            matching = _matching(value, present, exact=name.startswith("GLOO"))
            these = ", ".join(matching) or "no such interface"
            found = f"{value}: {these}; this machine has {', '.join(present)}"
            fix = f"unset {name}, or set one of: ip -brief link"
            yield expect(name, found, "" if matching else found, fix)


def _matching(value: str, present: list[str], exact: bool) -> list[str]:
    """The interfaces that a value selects: names or prefixes; ``=`` in front means whole names,
    ``^`` all others (HCCL)."""
    excluded, names = value.startswith("^"), value.removeprefix("^")
    exact, words = exact or names.startswith("="), names.removeprefix("=").split(",")
    matches = str.__eq__ if exact else str.startswith
    return [one for one in present if any(matches(one, word) for word in words) != excluded]


def _address_problem(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return "is not an IP address"
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((value, 0))
    except OSError:
        return "is not an address of this machine"
    return ""


def _read_by_vllm() -> set[str]:
    """The names in vLLM's table of variables, read from its source; empty if vLLM is not
    installed."""
    vllm = installation.package("vllm")
    table = vllm / "envs.py" if vllm else None
    if table is None or not table.is_file():
        return set()
    return {
        *re.findall(r'^    "(VLLM_\w+)":', table.read_text(), re.MULTILINE),
        *installation.VARIABLES,
    }
