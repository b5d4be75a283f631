# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``AscendStoreConnector``: vLLM's tiered offloading with a shared pool, under vllm-ascend's name
and options."""

from __future__ import annotations

from typing import Any

from ascend_kv_connector.offloading import OffloadingConnector
from ascend_kv_connector.store.options import StoreOptions


class AscendStoreConnector(OffloadingConnector):
    """Loads prefixes that any instance has computed from a shared pool.

    ``kv_both`` and ``kv_producer`` load and store, ``kv_consumer`` loads.
    """

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        StoreOptions.from_config(vllm_config.kv_transfer_config.kv_connector_extra_config).check(
            vllm_config
        )

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        options = StoreOptions.from_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._loads, self._stores = options.roles(vllm_config.kv_transfer_config)
        super().__init__(options.to_offloading_config(vllm_config), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        state = self.scheduler._req_status[request.request_id]
        if not self._loads:
            state.max_load_tokens = 0
        if not self._stores:
            state.max_offload_tokens = 0

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any) -> Any:
        options = StoreOptions.from_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(options.to_offloading_config(vllm_config), *more)
