"""HCCL collectives and the exchange of experts' tokens for vLLM on Ascend NPUs."""

from collections.abc import Mapping

from ascend_platform import extension

WAYS = ("allgather", "alltoall", "mc2")
"""How experts' tokens can travel: see experts.py."""


def register() -> None:
    """Offer the communicator to ascend-platform; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    """
    extension.join(
        "ascend-communicator", "ascend_communicator", _offer, options={"all2all": "auto"}, configured=_check_options, api="1.0"
    )


def _offer() -> None:
    extension.offer("communicator", "ascend_communicator.communicator.HCCLCommunicator")


def _check_options(options: Mapping[str, object]) -> None:
    if options["all2all"] not in ("auto", *WAYS):
        raise ValueError(f"ascend.communicator.all2all is {options['all2all']!r}; it can be auto, {', '.join(WAYS)}")
