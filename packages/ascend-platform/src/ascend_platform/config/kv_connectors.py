# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV connectors: only those that a component offers know the layout of the KV cache, and all others
are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform.config.state_layers import has_states
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.plugins import registry, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MULTI = "MultiConnector"
"""vLLM's connector of several connectors; it does not access the KV cache itself, so it is
supported if all its parts are."""


def resolve(vllm_config: VllmConfig) -> None:
    """Set ``kv_connector_module_path`` so that each connector's name refers to the offered class,
    before vLLM looks it up.

    Where vLLM has a connector of the same name, which does not work on NPUs, the path selects the
    offered one. A module of vllm-ascend is dropped: only the name selects the counterpart.

    Raises:
        RefusedError: a connector that is not offered, with those that are.
    """
    from vllm import envs
    from vllm.config import KVTransferConfig

    transfer, cache = cast(Any, vllm_config.kv_transfer_config), vllm_config.cache_config
    if cache is not None and cache.kv_offloading_size is not None:
        # vLLM creates the connector only after this hook (vllm/config/vllm.py).
        name = "LMCacheMPConnector"
        if cache.kv_offloading_backend == "native":
            is_simple = envs.VLLM_USE_SIMPLE_KV_OFFLOAD
            name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
        transfer = vllm_config.kv_transfer_config = transfer or KVTransferConfig()
        transfer.kv_connector_module_path = _module(name, None)
        return
    if transfer is None or not transfer.kv_connector:
        return
    transfer.kv_connector_module_path = _module(
        transfer.kv_connector, transfer.kv_connector_module_path
    )
    if transfer.kv_connector == MULTI:
        parts = transfer.kv_connector_extra_config.get("connectors")
        is_list = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
        if not is_list or not parts:
            raise RefusedError(
                f"KV connector {MULTI}: kv_connector_extra_config.connectors is {parts!r}; fix:"
                " make it a list with a configuration (kv_connector, kv_role) for each of its"
                " connectors"
            )
        for part in parts:
            part["kv_connector_module_path"] = _module(
                part.get("kv_connector"), part.get("kv_connector_module_path")
            )


def check(vllm_config: VllmConfig) -> None:
    """Call the connector class's ``check_config`` with the configuration, if it defines one.

    With layers that have states a connector has to set ``transfers_states``.

    Raises:
        RefusedError: the connector's own reason, or that it does not transfer states.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer = cast(Any, vllm_config.kv_transfer_config)
    if transfer is None or not transfer.kv_connector:
        return
    connector_class = KVConnectorFactory.get_connector_class(transfer)
    connectors = [(connector_class, vllm_config)]
    if transfer.kv_connector == MULTI:
        connectors = cast(Any, connector_class)._get_connector_classes_and_configs(vllm_config)
    for connector, config in connectors:
        if (
            vllm_config.model_config is not None
            and has_states(vllm_config)
            and not getattr(connector, "transfers_states", False)
        ):
            raise RefusedError(
                f"KV connector {connector.__name__} does not support models with state-space or"
                " linear attention layers; fix: use AscendP2PConnector, which does"
            )
        if check_config := getattr(connector, "check_config", None):
            check_config(config)


def note_checkpoint(vllm_config: VllmConfig) -> None:
    """Before weights are loaded for a connector, call the function offered for ``checkpoint.note``
    with the configuration of the model."""
    path = slots.offered("checkpoint.note")
    if path and vllm_config.kv_transfer_config is not None and vllm_config.model_config is not None:
        resolve_obj_by_qualname(path)(vllm_config.model_config)


def _module(name: str | None, module: str | None) -> str | None:
    """The module in which vLLM looks for the class of this name; None for its registry."""
    if module and not module.startswith("vllm_ascend."):
        return module  # the user's own
    if name == MULTI:
        return None
    offered = slots.offered(f"kv_connector.{name}")
    if not offered:
        what = f"KV connector {name} is not supported on Ascend NPUs"
        if supported := ", ".join(slots.names("kv_connector")):
            raise RefusedError(f"{what}; supported: {supported}; fix: name one of these")
        raise RefusedError(
            f"{what}; connectors for NPUs need {registry.with_state('ascend-kv-connector')}"
        )
    if module:
        logger.info(
            "ignoring kv_connector_module_path %s: %s is registered as %s", module, offered, name
        )
    found, _, cls = offered.rpartition(".")
    return found if cls == name else None
