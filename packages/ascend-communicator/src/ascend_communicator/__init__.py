"""HCCL collectives for vLLM on Ascend NPUs."""

from ascend_platform import extension


def register() -> None:
    """Offer the communicator to ascend-platform; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    """
    extension.join("ascend-communicator", "ascend_communicator", _offer, api="1.0")


def _offer() -> None:
    extension.offer("communicator", "ascend_communicator.communicator.HCCLCommunicator")
