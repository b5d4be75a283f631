"""HCCL collectives and the exchange of experts' tokens for vLLM on Ascend NPUs."""

import os
from collections.abc import Mapping

from ascend_platform import extension

WAYS = ("allgather", "alltoall", "mc2")
"""How experts' tokens can travel: see moe/select.py."""

OPTIONS = {"all2all": "auto", "groups": {}, "deterministic": False, "connect_timeout": None}
"""The keys of ``ascend.communicator`` and their defaults; docs/configuration.md explains them."""

GROUPS = ("tp", "pp", "dp", "ep", "eplb", "etp", "edp")
"""vLLM's groups that have a device communicator, by their names in ``vllm/distributed/parallel_state.py``."""

GROUP_OPTIONS = {
    "buffer_size": ("hccl_buffer_size", "MiB"),
    "exec_timeout": ("hccl_exec_timeout", "seconds"),
}
"""What one group can have: the key of torch_npu's ``ProcessGroupHCCL.Options.hccl_config``, and the unit."""


def register() -> None:
    """Offer the communicator to ascend-platform; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    """
    extension.join("ascend-communicator", "ascend_communicator", _offer, options=OPTIONS, configured=_take_options, api="1.4")


def _offer() -> None:
    extension.offer("communicator", "ascend_communicator.communicator.HCCLCommunicator")
    extension.offer("weight_transfer.hccl", "ascend_communicator.weight_transfer.HCCLWeightTransferEngine")
    extension.offer("hccl.link", "ascend_communicator.p2p_link.Link")


def _take_options(options: Mapping[str, object]) -> None:
    """Check the options, and set HCCL's variables for what it takes for all groups of a process alone.

    Raises:
        RefusedError: a value or a name that cannot be, in one line.
    """
    if options["all2all"] not in ("auto", *WAYS):
        raise _refused("all2all", options["all2all"], f"auto, {', '.join(WAYS)}")
    groups = options["groups"]
    if not isinstance(groups, Mapping):
        raise _refused("groups", groups, 'an object such as {"ep": {"buffer_size": 400}}')
    for name, values in groups.items():
        if name not in GROUPS or not isinstance(values, Mapping):
            raise _refused(f"groups.{name}", values, f"an object, for one of {', '.join(GROUPS)}")
        for key, value in values.items():
            if key not in GROUP_OPTIONS:
                raise _refused(f"groups.{name}.{key}", value, f"one of the keys {', '.join(GROUP_OPTIONS)}")
            _check_whole(f"groups.{name}.{key}", value, 1, 2**31 - 1, GROUP_OPTIONS[key][1])
    if not isinstance(options["deterministic"], bool):
        raise _refused("deterministic", options["deterministic"], "true or false")
    # HCCL reads both as its first group is made; processes that this one starts have them too
    if options["deterministic"]:
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if options["connect_timeout"] is not None:
        _check_whole("connect_timeout", options["connect_timeout"], 120, 7200, "seconds")
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(options["connect_timeout"])


def _check_whole(key: str, value: object, least: int, most: int, unit: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise _refused(key, value, f"a whole number of {unit} from {least} to {most}")


def _refused(key: str, value: object, allowed: str) -> extension.RefusedError:
    return extension.RefusedError(f"ascend.communicator.{key} is {value!r}; it can be {allowed}")
