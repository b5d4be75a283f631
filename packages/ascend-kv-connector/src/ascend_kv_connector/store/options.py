# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of ``AscendStoreConnector``, and their translation to vLLM's tiered offloading."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_platform import extension

from ascend_kv_connector.config import Positive, Seconds
from ascend_kv_connector.store.identity import cache_identity

NAME = "AscendStoreConnector"
SHM = "/dev/shm"
BACKENDS = {"mooncake": "ascend_mooncake", "disk": "ascend_disk"}
"""Tier type by backend name."""

IGNORED_KEYS = (
    "lookup_rpc_port",
    "mooncake_rpc_port",
    "load_async",
    "prefill_pp_size",
    "prefill_pp_layer_partition",
    "register_buffer",
    "use_layerwise",
)
"""Options of vllm-ascend's connectors for its processes' discovery, or for facts that ranks know
here; ignored."""

PASSED_THROUGH = ("block_size", "blocks_per_chunk", "eviction_policy", "offload_prompt_only")
"""Options of vLLM's OffloadingConnector with the same meaning here."""


@dataclass(frozen=True)
class StoreOptions:
    """Options and their defaults, documented in docs/kv-connector.md. Times are in seconds."""

    backend: str | list[str] = extension.option(
        "mooncake", "mooncake, disk, a list of these, or []"
    )
    cpu_bytes_to_use: Positive = extension.option(4 << 30, "host memory of all ranks, in /dev/shm")
    disk_path: str = extension.option("", "directory of backend disk")
    disk_bytes_to_use: Positive | None = extension.option(None, "limit of the directory")
    mooncake_config_path: str = extension.option("", "file with Mooncake's configuration")
    namespace: str = extension.option("", "instances of different namespaces share nothing")
    enable_lookup: bool = extension.option(True, "whether the instance loads")
    consumer_is_to_load: bool = extension.option(True, "whether a kv_consumer loads")
    consumer_is_to_put: bool = extension.option(False, "whether a kv_consumer stores")
    answer_timeout: Seconds = extension.option(5.0, "limit of a lookup in the pool")
    transfer_timeout: Seconds = extension.option(20.0, "limit of the chunks of a request")
    rest: Seconds = extension.option(10.0, "backoff from a pool that exceeded a timeout")
    threads: Positive = extension.option(2, "load threads, and as many store threads")
    enable_kv_events: bool = extension.option(False, "events of the pool's chunks for routers")
    block_size: Positive | None = extension.option(None, "as of vLLM's OffloadingConnector")
    blocks_per_chunk: Positive | None = extension.option(None, "as of OffloadingConnector")
    eviction_policy: str | None = extension.option(None, "as of OffloadingConnector")
    offload_prompt_only: bool | None = extension.option(None, "as of OffloadingConnector")

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> StoreOptions:
        """Validate ``kv_connector_extra_config``.

        Raises:
            RefusedError: an unknown key, with the closest known one, or an invalid value, in one
                line.
        """
        if config.get("use_layerwise"):
            raise extension.RefusedError(
                f"{NAME}: use_layerwise is not supported; chunks are stored asynchronously as they"
                " are finished; fix: remove it"
            )
        values = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        options = extension.parse_options(cls, values, f"{NAME}: kv_connector_extra_config")
        for backend in options.backends:
            if backend not in BACKENDS:
                raise extension.RefusedError(
                    f"{NAME}: backend is {backend!r}; supported: {', '.join(BACKENDS)}, a list of"
                    " these in lookup order, or [] for host memory only, which is not shared;"
                    " fix: set one of these"
                )
        if "disk" in options.backends and not options.disk_path:
            raise extension.RefusedError(
                f"{NAME}: backend disk needs disk_path; fix: set it to a directory that"
                " instances share"
            )
        return options

    @property
    def backends(self) -> list[str]:
        return [self.backend] if isinstance(self.backend, str) else list(self.backend)

    def check(self, vllm_config: Any) -> None:
        """Check that instances started with this configuration can share what they store.

        Raises:
            RefusedError: they cannot, in one line.
        """
        from ascend_kv_connector.offloading import check_single_host
        from ascend_kv_connector.store.mooncake import MooncakeConfig

        check_single_host(NAME, vllm_config)
        if (free := shutil.disk_usage(SHM).free) < self.cpu_bytes_to_use:
            raise extension.RefusedError(
                f"{NAME}: cpu_bytes_to_use is {self.cpu_bytes_to_use}, but {SHM} has {free} bytes"
                f" left; fix: reduce it or enlarge {SHM} (for a container: --shm-size)"
            )
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if (
            self.backends
            and algorithm.startswith("xxhash")
            and os.environ.get("PYTHONHASHSEED") is None
        ):
            raise extension.RefusedError(
                f"{NAME}: --prefix-caching-hash-algo is {algorithm}, whose hashes differ from"
                " process to process without a seed; fix: set PYTHONHASHSEED to the same number for all"
                " instances, or use the default algorithm"
            )
        events = vllm_config.kv_events_config
        if self.enable_kv_events and not (events and events.enable_kv_cache_events):
            raise extension.RefusedError(
                f"{NAME}: enable_kv_events needs --kv-events-config with enable_kv_cache_events; fix:"
                " add it, for vLLM to publish them"
            )
        if "mooncake" in self.backends:
            MooncakeConfig.read(self.mooncake_config_path).check()

    def roles(self, transfer: Any) -> tuple[bool, bool]:
        """Whether an instance with this ``kv_role`` loads, and whether it stores."""
        if transfer.kv_role == "kv_consumer":
            return self.enable_lookup and self.consumer_is_to_load, self.consumer_is_to_put
        return self.enable_lookup, True

    def to_offloading_config(self, vllm_config: Any) -> Any:
        """VllmConfig with the equivalent options of vLLM's OffloadingConnector."""
        config, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
        common = {
            name: getattr(self, name)
            for name in ("answer_timeout", "transfer_timeout", "rest", "threads")
        }
        identity = {"namespace": self.namespace} | cache_identity(vllm_config)
        common |= {"identity": identity, "kv_events": self.enable_kv_events}
        tiers: dict[str, dict[str, Any]] = {
            "disk": {"path": self.disk_path, "quota": self.disk_bytes_to_use},
            "mooncake": {"config_path": self.mooncake_config_path},
        }
        transfer.kv_connector_extra_config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": self.cpu_bytes_to_use,
            "secondary_tiers": [
                {"type": BACKENDS[name]} | tiers[name] | common for name in self.backends
            ],
        } | {name: value for name in PASSED_THROUGH if (value := getattr(self, name)) is not None}
        # MultiConnector's connectors need separate host memory
        transfer.engine_id = f"{transfer.engine_id}-store"
        config.kv_transfer_config = transfer
        return config
