"""What ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config`` may hold for the connectors of this wheel."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ascend_platform import extension

IGNORED = ("prefill", "decode", "use_ascend_direct")
"""Keys of vllm-ascend's connectors that say what ranks of this one tell each other; they are left unread."""


MODES = ("pull", "push")
"""What is done with a request that does not say where its prompt is: computed here, or asked for at the metaserver."""


@dataclass(frozen=True)
class Options:
    """The keys and their defaults; the README explains them. Times are in seconds."""

    transport: str = "mooncake"
    protocol: str = "tcp"
    host: str = ""
    transfer_timeout: float = 120.0
    answer_timeout: float = 10.0
    lease: float = 120.0
    chunk_mib: int = 16
    slots: int = 4
    lanes: int = 2
    verify: bool = False
    secret_file: str = ""
    mode: str = "pull"
    metaserver: str = ""

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_mib << 20

    @classmethod
    def take(cls, given: Mapping[str, object]) -> Options:
        """Check what the user gave.

        Raises:
            RefusedError: an unknown key, with the nearest known one, or a value that cannot be, in one line.
        """
        known = {field.name: field.default for field in fields(cls)}
        values = {}
        for key, value in given.items():
            if key in IGNORED:
                continue
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise extension.RefusedError(f"kv_connector_extra_config has no key {key!r}; {hint}")
            values[key] = _checked(key, value, known[key])
        options = cls(**values)  # type: ignore[arg-type]
        if options.mode not in MODES:
            raise extension.RefusedError(f"kv_connector_extra_config.mode is {options.mode!r}; it can be {' or '.join(MODES)}")
        if options.metaserver and options.mode != "push":
            raise extension.RefusedError("kv_connector_extra_config.metaserver is of mode push; give mode push, or leave it out")
        if options.metaserver and not options.metaserver.startswith(("http://", "https://")):
            raise extension.RefusedError(f"kv_connector_extra_config.metaserver is {options.metaserver!r}; it can be an http URL")
        return options


def _checked(key: str, value: object, default: object) -> object:
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, str):
        fits, kind = isinstance(value, str), "a string"
    elif isinstance(default, int):
        fits, kind = type(value) is int and value > 0, "a whole number above 0"
    else:
        fits, kind = type(value) in (int, float) and value > 0, "a number of seconds above 0"  # type: ignore[operator]
    if not fits:
        raise extension.RefusedError(f"kv_connector_extra_config.{key} is {value!r}; it can be {kind}")
    return value


def check_cache(name: str, kv_cache_config: Any) -> None:
    """Look whether a connector can serve these KV caches, vLLM's KVCacheConfig.

    Raises:
        RefusedError: several groups of them, or another kind than full attention, in one line.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(spec).__name__ for group in groups for spec in iter_layer_specs(group.kv_cache_spec)})
    if len(groups) != 1 or kinds != [FullAttentionSpec.__name__]:
        raise extension.RefusedError(
            f"{name} serves one group of KV caches of full attention; the model has {len(groups)} of kind {', '.join(kinds)}; "
            "--disable-hybrid-kv-cache-manager makes one of windows and full attention"
        )
