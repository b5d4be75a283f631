# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weight loading for vLLM on Ascend NPUs: from a peer engine, streamed from a checkpoint, or by
vLLM's default loader."""

from ascend_platform import extension

FORMATS = ("ascend_peer", "netloader")
"""Names of the load format; ``netloader`` is vllm-ascend's name for it."""


def register() -> None:
    """Offer the load format to ascend-platform; never raises.

    Entry point of group ``vllm.general_plugins``: vLLM calls it in every process, possibly more
    than once.
    """
    extension.join("ascend-model-loader", "ascend_model_loader", _offer, api="1.6")


def _offer() -> None:
    for name in FORMATS:
        extension.offer(f"load_format.{name}", "ascend_model_loader.loader.PeerModelLoader")
        extension.offer(f"load_options.{name}", "ascend_model_loader.options.parse_options")
    extension.offer("worker.awake", "ascend_model_loader.server.awake")
