# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of AscendP2PConnector in ``kv_connector_extra_config`` of vLLM's
``--kv-transfer-config``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ascend_platform import extension

from ascend_kv_connector.p2p.states import LAST_STATE

IGNORED_KEYS = ("prefill", "decode", "use_ascend_direct")
"""Options of vllm-ascend's connectors for facts that ranks exchange in the handshake here; ignored.
"""

Kind = TypeVar("Kind")

MODES = ("pull", "push")
"""How to serve a request that names no source for its prompt: prefill it here (pull), or ask the
metaserver for it (push)."""


@dataclass(frozen=True)
class Options:
    """Options and their defaults, documented in docs/kv-connector.md. Times are in seconds."""

    transport: str = "mooncake"
    protocol: str = "tcp"
    host: str = ""
    transfer_timeout: float = 120.0
    answer_timeout: float = 10.0
    lease: float = 30.0
    chunk_mib: int = 16
    slots: int = 4
    lanes: int = 2
    verify: bool = False
    expose_cache: bool = True
    secret_file: str = ""
    insecure: bool = False
    ports: str = ""
    peers: str | list[str] = ""
    mode: str = "pull"
    metaserver: str | list[str] = ""

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_mib << 20

    @property
    def metaservers(self) -> list[str]:
        """URLs of routers that may be contacted; with mode push, the first one by default."""
        return _names(self.metaserver)

    @property
    def port_range(self) -> range | None:
        """Ports to choose from, None if any."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if self.ports else None

    @property
    def peer_hosts(self) -> list[str]:
        return _names(self.peers)

    @classmethod
    def from_config(cls, given: Mapping[str, object]) -> Options:
        """Validate ``kv_connector_extra_config``.

        Raises:
            RefusedError: an unknown key, with the closest known one, or an invalid value, in one
            line.
        """
        options = parse_options(cls, given, IGNORED_KEYS)
        if options.mode not in MODES:
            raise extension.RefusedError(
                f"kv_connector_extra_config.mode is {options.mode!r}; it must be"
                f" {' or '.join(MODES)}"
            )
        first, _, last = options.ports.partition("-")
        if options.ports and not (
            first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536
        ):
            raise extension.RefusedError(
                f"kv_connector_extra_config.ports is {options.ports!r}; it must be the first and"
                ' last port, such as "20000-20099"'
            )
        for url in options.metaservers:
            if not url.startswith(("http://", "https://")):
                raise extension.RefusedError(
                    f"kv_connector_extra_config.metaserver is {url!r}; it must be a URL"
                )
        return options


def parse_options(
    kind: type[Kind], given: Mapping[str, object], ignored: Collection[str], title: str = ""
) -> Kind:
    """Parse user options into a dataclass; ``title`` is the prefix of error messages.

    Raises:
        RefusedError: an unknown key, with the closest known one, or a value of the wrong type, in
        one line.
    """
    values = {key: value for key, value in given.items() if key not in ignored}
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise extension.RefusedError(
                f"{title}kv_connector_extra_config has no key {key!r}; {hint}"
            )
        if wanted := _expected(value, known[key]):
            raise extension.RefusedError(
                f"{title}kv_connector_extra_config.{key} is {value!r}; it must be {wanted}"
            )
    return kind(**values)


def _names(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value)


def _expected(value: object, kind: str) -> str:
    """The expected value as text, or "" if the value has the annotated type."""
    if kind.startswith("bool"):
        return "" if isinstance(value, bool) else "true or false"
    if kind.startswith("int"):
        return "" if type(value) is int and value > 0 else "a positive integer"
    if kind.startswith("float"):
        return "" if type(value) in (int, float) and value > 0 else "a positive number of seconds"  # type: ignore[operator]
    if "list" in kind:
        names = [value] if isinstance(value, str) else value
        return (
            ""
            if isinstance(names, list) and all(isinstance(name, str) for name in names)
            else "a name or a list of names"
        )
    return "" if isinstance(value, str) else "a string"


def sliding_windows(name: str, groups: list[Any], states: bool = False) -> tuple[int, ...]:
    """Tokens that each KV cache group (vLLM's KVCacheGroupSpec) retains; 0 means all,
    ``LAST_STATE`` that it has ``states``.

    Raises:
        RefusedError: KV caches other than full attention and sliding window, or several block
        sizes, in one line.
    """
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    specs = [list(iter_layer_specs(group.kv_cache_spec)) for group in groups]
    paged = [spec for group in specs for spec in group if not (states and type(spec) is MambaSpec)]
    kinds = sorted({type(spec).__name__ for spec in paged})
    sizes = sorted({spec.block_size for spec in paged})
    supported = {each.__name__ for each in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)}
    if not {*kinds} <= supported or len(sizes) != 1:
        raise extension.RefusedError(
            f"{name} supports KV caches of full, latent and sliding-window attention with one block"
            f" size; the model has {', '.join(kinds) or 'only states'} with blocks of"
            f" {', '.join(map(str, sizes))} tokens; remove the connector"
        )
    # A group's specs are equal (vllm/v1/kv_cache_interface.py, UniformTypeKVCacheSpecs).
    firsts = [group[0] for group in specs]
    if states and len(paged) < sum(map(len, specs)):
        return tuple(LAST_STATE if type(first) is MambaSpec else 0 for first in firsts)
    return tuple(
        (
            first.sliding_window + getattr(first, "extra_retained_tokens", 0)
            if type(first) is SlidingWindowSpec
            else 0
        )
        for first in firsts
    )


def paged_block_size(groups: list[Any]) -> int:
    """Tokens of a block of attention layers, whose groups have one size."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return next(
        group.kv_cache_spec.block_size
        for group in groups
        if type(group.kv_cache_spec) is not MambaSpec
    )
