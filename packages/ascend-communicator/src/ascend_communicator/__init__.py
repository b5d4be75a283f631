# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL collectives and MoE all-to-all for vLLM on Ascend NPUs."""

import os
from collections.abc import Mapping

from ascend_platform import extension

ALL2ALL_BACKENDS = ("allgather", "alltoall", "mc2")
"""Backends of MoE dispatch and combine; see moe/select.py."""

OPTIONS = {"all2all": "auto", "groups": {}, "deterministic": False, "connect_timeout": None}
"""Keys and defaults of ``ascend.communicator``; see docs/configuration.md."""

GROUPS = ("tp", "pp", "dp", "ep", "eplb", "etp", "edp", "mc2")
"""Names of vLLM's groups with a device communicator (``vllm/distributed/parallel_state.py``), and
the name of MC2's group."""

GROUP_OPTIONS = {
    "buffer_size": ("hccl_buffer_size", "MiB"),
    "exec_timeout": ("hccl_exec_timeout", "seconds"),
}
"""Options of a group: key of torch_npu's ``ProcessGroupHCCL.Options.hccl_config``, and unit."""


def register() -> None:
    """Offer the communicator to ascend-platform; never raises.

    Entry point of the group ``vllm.general_plugins``. vLLM calls it in every process, possibly more
    than once.
    """
    extension.join(
        "ascend-communicator",
        "ascend_communicator",
        _offer,
        options=OPTIONS,
        configured=_take_options,
        api="1.5",
    )


def _offer() -> None:
    extension.offer("communicator", "ascend_communicator.communicator.HCCLCommunicator")
    extension.offer(
        "weight_transfer.hccl", "ascend_communicator.weight_transfer.HCCLWeightTransferEngine"
    )
    extension.offer("hccl.link", "ascend_communicator.p2p_link.P2PLink")


def _take_options(options: Mapping[str, object]) -> None:
    """Check the options, and set the environment variables of those that HCCL supports per process
    only.

    Raises:
        RefusedError: an unknown name or an unsupported value.
    """
    if options["all2all"] not in ("auto", *ALL2ALL_BACKENDS):
        raise _refused("all2all", options["all2all"], f"auto, {', '.join(ALL2ALL_BACKENDS)}")
    groups = options["groups"]
    if not isinstance(groups, Mapping):
        raise _refused("groups", groups, 'an object such as {"ep": {"buffer_size": 400}}')
    for name, values in groups.items():
        if name not in GROUPS or not isinstance(values, Mapping):
            raise _refused(f"groups.{name}", values, f"an object, for one of {', '.join(GROUPS)}")
        for key, value in values.items():
            if key not in GROUP_OPTIONS:
                raise _refused(
                    f"groups.{name}.{key}", value, f"one of the keys {', '.join(GROUP_OPTIONS)}"
                )
            _check_int(f"groups.{name}.{key}", value, 1, 2**31 - 1, GROUP_OPTIONS[key][1])
    if not isinstance(options["deterministic"], bool):
        raise _refused("deterministic", options["deterministic"], "true or false")
    # HCCL reads both when the first group is created, and child processes inherit them.
    if options["deterministic"]:
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if options["connect_timeout"] is not None:
        _check_int("connect_timeout", options["connect_timeout"], 120, 7200, "seconds")
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(options["connect_timeout"])


def _check_int(key: str, value: object, minimum: int, maximum: int, unit: str) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise _refused(key, value, f"an integer from {minimum} to {maximum} ({unit})")


def _refused(key: str, value: object, allowed: str) -> extension.RefusedError:
    return extension.RefusedError(f"ascend.communicator.{key} is {value!r}; supported: {allowed}")
