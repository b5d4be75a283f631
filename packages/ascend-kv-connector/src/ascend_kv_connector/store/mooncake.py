# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Mooncake's store (``mooncake.store``) as a pool: a master that locates chunks, and processes that
contribute memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_platform import extension
from ascend_transfer import mooncake
from ascend_transfer.secret import read_file

from ascend_kv_connector.store.pool import LOADED, STORED, PoolError
from ascend_kv_connector.store.tier import PoolTier, TierOptions

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
"""Environment variable that Mooncake, vLLM and vllm-ascend use for the path of the configuration.
"""

FULL, MISSING = (-200,), (-704,)
"""Mooncake's codes (``mooncake-store/include/types.h``): no space; no such object, or none of its
replicas."""

UNREACHABLE = (-900, -901)
"""Codes for a master that does not respond."""

UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


@dataclass(frozen=True)
class MooncakeConfig:
    """Mooncake's configuration, as far as used; sizes are in bytes, or strings such as "4GB" in the
    file.

    ``global_segment_size`` is the memory that this instance contributes to the pool; its content is
    lost when the instance ends.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = ""
    global_segment_size: int = 0
    local_buffer_size: int = 16 << 20
    tenant_id: str = "default"

    @classmethod
    def read(cls, path: str) -> MooncakeConfig:
        """Read the file, by default that of ``MOONCAKE_CONFIG_PATH``; ``MOONCAKE_MASTER`` and
        ``MOONCAKE_GLOBAL_SEGMENT_SIZE`` override it.

        Raises:
            RefusedError: it is missing or invalid, in one line.
        """
        if not (path := path or os.environ.get(CONFIG_ENV, "")):
            raise extension.RefusedError(
                f"backend mooncake has no configuration; fix: set {CONFIG_ENV} to the path of a file with"
                ' {"master_server_address": "HOST:PORT"}, or mooncake_config_path in'
                " kv_connector_extra_config"
            )
        try:
            values = json.loads(read_file(path)[0])
            known = {
                name: values[name]
                for name in cls.__dataclass_fields__
                if values.get(name) is not None
            }
            known = cls._parse_sizes(known | cls._from_environment())
            return extension.parse_options(cls, known, f"backend mooncake: {path}")
        except extension.RefusedError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise extension.RefusedError(
                f"backend mooncake: {path} is not a Mooncake configuration ({type(error).__name__}:"
                f' {error}); fix: write a JSON object with at least "master_server_address"'
            ) from None

    @staticmethod
    def _from_environment() -> dict[str, str]:
        named = {
            "master_server_address": "MOONCAKE_MASTER",
            "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
        }
        return {
            name: os.environ[variable]
            for name, variable in named.items()
            if os.environ.get(variable)
        }

    @staticmethod
    def _parse_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(values)
        for name in ("global_segment_size", "local_buffer_size"):
            if isinstance(value := out.get(name), str):
                if (
                    not (match := re.fullmatch(r"\s*([\d.]+)\s*([KMG]?B?)\s*", value.upper()))
                    or match[2] not in UNITS
                ):
                    raise ValueError(f"{name} is {value!r}")
                out[name] = int(float(match[1]) * UNITS[match[2]])
        return out

    def check(self, seconds: float = 3.0) -> None:
        """Check that Mooncake is installed and the master is reachable.

        Raises:
            RefusedError: it is not, in one line.
        """
        mooncake.check()
        host, _, port = self.master_server_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), seconds).close()
        except (OSError, ValueError) as error:
            raise extension.RefusedError(
                "backend mooncake: no master at master_server_address"
                f" {self.master_server_address!r} ({error}); fix: start one with mooncake_master --port"
                " PORT, or correct the address"
            ) from None


class MooncakePool:
    """See :class:`~ascend_kv_connector.store.pool.Pool`. Mooncake's calls release the GIL and time
    out after 30 s, or as ``MC_RPC_TIMEOUT_MS`` and others say."""

    def __init__(self, config: MooncakeConfig) -> None:
        """Join the pool.

        Raises:
            RefusedError: Mooncake is not installed, lacks a library, or does not start.
        """
        config.check()
        store = mooncake.import_module("mooncake.store")
        from vllm.utils.network_utils import get_ip

        self.description = (
            f"Mooncake's store of master {config.master_server_address} ({config.protocol})"
        )
        self._store: Any = store.MooncakeDistributedStore()
        setup = {
            "local_hostname": config.local_hostname or get_ip(),
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "rdma_devices": config.device_name,
            "master_server_addr": config.master_server_address,
            "tenant_id": config.tenant_id,
        }
        if code := self._store.setup(setup):
            raise extension.RefusedError(
                f"backend mooncake: cannot join {self.description} from {setup['local_hostname']}"
                f" (code {code}); fix: set protocol to tcp, or to ascend with"
                f" {mooncake.WHEELS[0]}, and local_hostname to this machine's address"
            )
        self._buffers: list[mmap.mmap] = []

    def buffer(self, size: int) -> memoryview:
        memory = mmap.mmap(-1, size)
        if code := self._store.register_buffer(_address(memory), size):
            raise PoolError(f"{size} bytes of host memory cannot be registered (code {code})")
        self._buffers.append(memory)  # must outlive its registration
        return memoryview(memory)

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [code > 0 for code in self._check_reachable(self._store.batch_is_exist(list(names)))]

    def put(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        codes = self._store.batch_put_from(list(names), *_addresses_and_sizes(records))
        return [_outcome(code, STORED) for code in self._check_reachable(codes)]

    def get(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        codes = self._check_reachable(
            self._store.batch_get_into(list(names), *_addresses_and_sizes(records))
        )
        cut = [0 <= code < len(record) for code, record in zip(codes, records, strict=True)]
        return [
            "cut" if short else _outcome(code, LOADED)
            for code, short in zip(codes, cut, strict=True)
        ]

    def remove(self, names: Sequence[str]) -> None:
        self._check_reachable(self._store.batch_remove(list(names), True))

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _check_reachable(self, codes: list[int]) -> list[int]:
        if codes and all(code in UNREACHABLE for code in codes):
            raise PoolError(f"the master does not respond (code {codes[0]})")
        return codes


def _outcome(code: int, good: str) -> str:
    if code >= 0:
        return good
    return "full" if code in FULL else "missing" if code in MISSING else f"failed {code}"


def _addresses_and_sizes(records: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    return [_address(record) for record in records], [len(record) for record in records]


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True)
class MooncakeEntry(TierOptions):
    """Entry of a MooncakeTier. ``config_path``: path of Mooncake's configuration, overriding the
    environment."""

    config_path: str = ""


class MooncakeTier(PoolTier):
    """Tier over a MooncakePool."""

    entry = MooncakeEntry

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        config_path: str = "",
        **more: Any,
    ) -> None:
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            MooncakePool(MooncakeConfig.read(config_path)),
            **more,
        )
