"""Which KV connectors `--kv-transfer-config` can name: those that a component offers, for it knows how the KV cache lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ascend_platform import extension

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MULTI = "MultiConnector"
"""vLLM's connector of several connectors; it has no KV cache of its own to do with, and serves where all of its parts do."""


def resolve(vllm_config: VllmConfig) -> None:
    """Let each connector's name stand for the class that is offered under it, before vLLM looks the class up.

    A name that vLLM has a connector for too, which cannot serve here, is given the module of the offered one; the module of
    vllm-ascend is left out, as the name alone is enough.

    Raises:
        RefusedError: a connector that is not offered, with those that are.
    """
    from vllm import envs
    from vllm.config import KVTransferConfig

    transfer, cache = cast(Any, vllm_config.kv_transfer_config), vllm_config.cache_config
    if cache is not None and cache.kv_offloading_size is not None:
        # it becomes a connector only after the platform has been asked (vllm/config/vllm.py)
        simple = "SimpleCPUOffloadConnector" if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else "OffloadingConnector"
        name = simple if cache.kv_offloading_backend == "native" else "LMCacheMPConnector"
        transfer = vllm_config.kv_transfer_config = transfer or KVTransferConfig()
        transfer.kv_connector_module_path = _module(name, None)
        return
    if transfer is None or not transfer.kv_connector:
        return
    transfer.kv_connector_module_path = _module(transfer.kv_connector, transfer.kv_connector_module_path)
    if transfer.kv_connector == MULTI:
        parts = transfer.kv_connector_extra_config.get("connectors")
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise extension.RefusedError(
                f"KV connector {MULTI}: kv_connector_extra_config.connectors is {parts!r}; it is a list with a configuration "
                "(kv_connector, kv_role) for each of its connectors"
            )
        for part in parts:
            part["kv_connector_module_path"] = _module(part.get("kv_connector"), part.get("kv_connector_module_path"))


def check(vllm_config: VllmConfig) -> None:
    """Let the connector's class look at the configuration, where it has ``check_config``.

    Raises:
        RefusedError: the connector's own reason.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer = cast(Any, vllm_config.kv_transfer_config)
    if transfer is None or not transfer.kv_connector:
        return
    found = KVConnectorFactory.get_connector_class(transfer)
    given = [(found, vllm_config)]
    if transfer.kv_connector == MULTI:
        given = cast(Any, found)._get_connector_classes_and_configs(vllm_config)
    for connector, config in given:
        if asked := getattr(connector, "check_config", None):
            asked(config)


def _module(name: str | None, module: str | None) -> str | None:
    """Where vLLM is to look for the class of this name; None for its registry."""
    if module and not module.startswith("vllm_ascend."):
        return module  # the user's own
    if name == MULTI:
        return None
    offered = extension.offered(f"kv_connector.{name}")
    if not offered:
        known = sorted(slot.removeprefix("kv_connector.") for slot in extension._offers if slot.startswith("kv_connector."))
        do = f"use one of {', '.join(known)}" if known else "install it, and let VLLM_PLUGINS name ascend_kv_connector"
        raise extension.RefusedError(
            f"KV connector {name} is not for Ascend NPUs; ascend-kv-connector, which has some, is "
            f"{extension.state('ascend-kv-connector')}; {do}"
        )
    if module:
        extension.logger.info("kv_connector_module_path %s is left out: %s is registered as %s", module, offered, name)
    found, _, cls = offered.rpartition(".")
    return found if cls == name else None
