"""Load formats for vLLM on Ascend NPUs: weights from peers, from streams and from vLLM's default loader, in that order."""

from ascend_platform import extension

FORMATS = ("ascend_peer", "netloader")
"""Names of the one load format; the second is the one that vllm-ascend's users know."""


def register() -> None:
    """Offer the load format to ascend-platform; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    """
    extension.join("ascend-model-loader", "ascend_model_loader", _offer, api="1.2")


def _offer() -> None:
    for name in FORMATS:
        extension.offer(f"load_format.{name}", "ascend_model_loader.loader.PeerModelLoader")
        extension.offer(f"load_options.{name}", "ascend_model_loader.options.parse_options")
    extension.offer("worker.awake", "ascend_model_loader.server.awake")
