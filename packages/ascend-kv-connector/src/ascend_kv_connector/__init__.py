# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache transfer for vLLM on Ascend NPUs."""

import sys

from ascend_platform import extension

CONNECTOR = "ascend_kv_connector.connector.AscendP2PConnector"

STORE = "ascend_kv_connector.store.connector.AscendStoreConnector"

CONNECTORS = {
    "AscendP2PConnector": CONNECTOR,
    "MooncakeConnectorV1": CONNECTOR,
    "MooncakeLayerwiseConnector": CONNECTOR,
    "AscendStoreConnector": STORE,
    "MooncakeConnectorStoreV1": STORE,
    "OffloadingConnector": "ascend_kv_connector.offloading.OffloadingConnector",
}
"""Values of ``kv_connector`` in ``--kv-transfer-config``. OffloadingConnector is that of vLLM with
NPU copies; the names with Mooncake are vllm-ascend's aliases."""


def register() -> None:
    """Register the connectors; never raises.

    Entry point of group ``vllm.general_plugins``: vLLM calls it in every process, possibly more
    than once.
    """
    extension.join(
        "ascend-kv-connector", "ascend_kv_connector", _offer, note=", ".join(CONNECTORS), api="1.9"
    )


def _offer() -> None:
    for name, path in CONNECTORS.items():
        extension.offer(f"kv_connector.{name}", path)
    extension.offer("checkpoint.note", "ascend_transfer.checkpoint.note_files")
    extension.offer("worker.awake.kv_connector", "ascend_kv_connector.set_awake")
    if "vllm" not in sys.modules:
        # This lists the components outside of vLLM; vLLM itself is imported before its plugins are
        # loaded.
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, path in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # Registering a name twice is an error.
            module, _, cls = path.rpartition(".")
            KVConnectorFactory.register_connector(name, module, cls)


def set_awake(state: bool) -> None:
    """Hook of the platform's worker, see ``p2p.worker.set_awake``: an engine that transfers nothing
    does not import it."""
    if worker := sys.modules.get("ascend_kv_connector.p2p.worker"):
        worker.set_awake(state)
