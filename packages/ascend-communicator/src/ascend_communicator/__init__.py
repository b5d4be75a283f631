# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL collectives and MoE all-to-all for vLLM on Ascend NPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ascend_platform import extension

ALL2ALL_BACKENDS = ("allgather", "alltoall", "mc2")
"""Backends of MoE dispatch and combine; see moe/select.py."""

GROUPS = ("tp", "pp", "dp", "ep", "eplb", "etp", "edp", "mc2")
"""Names of vLLM's groups with a device communicator (``vllm/distributed/parallel_state.py``), and
of MC2's group."""

HCCL_CONFIG = {
    "buffer_size": "hccl_buffer_size",
    "exec_timeout": "hccl_exec_timeout",
    "expansion_mode": "hccl_op_expansion_mode",
}
"""Key of torch_npu's ``ProcessGroupHCCL.Options.hccl_config`` by option of a group."""

EXPANSION_MODES = {"default": 0, "AIV": 3}
"""HCCL's numbers of the modes (CANN's reference, ``HcclCommConfig``)."""


@dataclass(frozen=True)
class GroupOptions:
    """Options of one group."""

    buffer_size: Annotated[int, extension.Range(1, 2**31 - 1, "MiB")] = extension.option(
        None, "HCCL's buffer"
    )
    exec_timeout: Annotated[int, extension.Range(1, 2**31 - 1, "seconds")] = extension.option(
        None, "how long a collective waits for other ranks"
    )
    expansion_mode: Literal["default", "AIV"] = extension.option(
        None, "`AIV`: collectives on the vector cores; `default`: as HCCL_OP_EXPANSION_MODE says"
    )


@dataclass(frozen=True)
class Options:
    """Options of ``ascend.communicator``; see docs/configuration.md."""

    all2all: Literal["auto", "allgather", "alltoall", "mc2"] = extension.option(
        "auto", "backend of MoE dispatch and combine; `auto` chooses by chip and step"
    )
    groups: dict[str, Any] = extension.option(
        {}, "`buffer_size`, `exec_timeout` and `expansion_mode` by group"
    )
    deterministic: bool = extension.option(False, "collectives whose results are reproducible")
    connect_timeout: Annotated[int, extension.Range(120, 7200, "seconds")] | None = (
        extension.option(None, "how long ranks wait for each other when a group is created")
    )

    def __post_init__(self) -> None:
        where = "additional_config ascend.communicator.groups"
        for name, values in self.groups.items():
            if name not in GROUPS:
                raise extension.RefusedError(
                    f"{where} has no key {name!r}; fix: use one of {', '.join(GROUPS)}"
                )
            extension.parse_options(GroupOptions, values, f"{where}.{name}")

    def hccl_config(self, group: str) -> dict[str, int]:
        """The options of a group by their keys in torch_npu's ``hccl_config``."""
        given = self.groups.get(group, {})
        return {HCCL_CONFIG[key]: EXPANSION_MODES.get(given[key], given[key]) for key in given}


def options() -> Options:
    """The options of the engine whose configuration is vLLM's current one."""
    return Options(**extension.config("communicator"))  # type: ignore[arg-type]


def register() -> None:
    """Offer the communicator to ascend-platform; never raises.

    Entry point of the group ``vllm.general_plugins``. vLLM calls it in every process, possibly more
    than once.
    """
    extension.join(
        "ascend-communicator",
        "ascend_communicator",
        _offer,
        options=Options,
        configured=_take_options,
        api="1.8",
    )


def _offer() -> None:
    extension.offer("communicator", "ascend_communicator.communicator.HCCLCommunicator")
    extension.offer(
        "weight_transfer.hccl", "ascend_communicator.weight_transfer.HCCLWeightTransferEngine"
    )
    extension.offer("transfer_engine.hccl", "ascend_communicator.hccl_engine.HcclEngine")


def _take_options(values: Mapping[str, object]) -> None:
    """Set the environment variables of the options that HCCL supports per process only.

    HCCL reads both when the first group is created; child processes inherit them.
    """
    if values["deterministic"]:
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if values["connect_timeout"] is not None:
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(values["connect_timeout"])
