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
"""The names that ``kv_connector`` of vLLM's ``--kv-transfer-config`` can have. OffloadingConnector is vLLM's with the NPU's
part; the names with Mooncake are vllm-ascend's for the same."""


def register() -> None:
    """Register the connectors; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    """
    extension.join("ascend-kv-connector", "ascend_kv_connector", _offer, note=", ".join(CONNECTORS), api="1.4")


def _offer() -> None:
    for name, path in CONNECTORS.items():
        extension.offer(f"kv_connector.{name}", path)
    if "vllm" not in sys.modules:
        return  # somebody who looks at the components; vLLM, which calls this as it loads its plugins, is there
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, path in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # which refuses a name a second time
            module, _, cls = path.rpartition(".")
            KVConnectorFactory.register_connector(name, module, cls)
