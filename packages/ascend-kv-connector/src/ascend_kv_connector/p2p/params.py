# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``kv_transfer_params`` of a request: parsed once, and written for routers and other instances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ascend_transfer.errors import printable
from ascend_transfer.rpc import MAX_PORT

from ascend_kv_connector.p2p.protocol import MAX_NAME, MAX_RANKS
from ascend_kv_connector.p2p.transfers import Source

MAX_ABORTED = 1024
"""Requests that one ``aborted_request`` may name."""

MAX_NUMBER = 1 << 53
"""Upper limit of numbers in JSON; a client may send numbers that are larger than any float."""

SOURCE = (
    "remote_engine_id",
    "remote_request_id",
    "remote_num_tokens",
    "remote_ranks",
    "remote_prompt_digest",
)
"""Keys that a decode instance needs for a prompt with a remote prefill."""

READER = ("remote_reader", "remote_ranks", "remote_prompt_digest")
"""Keys that a prefill instance needs for a prompt that a decode instance waits for."""

SIGNED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_reader",
    "remote_ranks",
    "remote_num_tokens",
    "remote_prompt_digest",
    "remote_version",
    "remote_expires",
)
"""Keys that the signature covers; routers may add others."""

TYPES: dict[str, type | tuple[type, ...]] = {
    "metaserver": str,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_reader": str,
    "remote_num_tokens": int,
    "remote_prompt_digest": str,
    "remote_version": str,
    "remote_expires": int,
    "remote_signature": str,
    "remote_lease": (int, float),
}


@dataclass(frozen=True)
class TransferParams:
    """Fields have the names of the keys. These are those of vLLM's own connectors and, for
    layer-by-layer transfers, of vllm-ascend, except remote_ranks, remote_reader,
    remote_prompt_digest and remote_version, the version of weights and adapter, None for those of
    the checkpoint.

    A key is None if it is absent or its value has the wrong type. ``invalid_source`` and
    ``invalid_reader`` say which key of a source or a reader is unusable; "" if none is.
    ``names_source``: a source or a router is named.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    request_id: str | None = None
    metaserver: str | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_reader: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ranks: tuple[tuple[str, int], ...] | None = None
    remote_num_tokens: int | None = None
    remote_cached_tokens: int | None = None
    remote_prompt_digest: str | None = None
    remote_version: str | None = None
    remote_lease: float | None = None
    remote_block_ids: list[list[int]] | None = None
    tp_size: int | None = None
    remote_protocol: Any = None
    remote_expires: int | None = None
    remote_signature: str | None = None
    aborted_request: tuple[str, ...] | None = None

    invalid_source: str = ""
    invalid_reader: str = ""
    names_source: bool = False

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> TransferParams:
        """The parameters of a request, which come from whoever may call vLLM's API."""
        if not params:
            return NO_PARAMS
        values = {
            key: params[key]
            for key, form in TYPES.items()
            if isinstance(params.get(key), form)
            and (key == "metaserver" or _is_usable(params[key]))
        }
        invalid = {
            key: f"has {key} {printable(repr(params.get(key)))}, which is not from"
            " AscendP2PConnector"
            for key in ("metaserver", *SOURCE, *READER)
            if key not in values
        }
        if isinstance(ranks := params.get("remote_ranks"), list):
            invalid["remote_ranks"] = (
                f"has remote_ranks {printable(repr(ranks))}, which are not hosts and ports"
            )
            if _are_ranks(ranks):
                values["remote_ranks"] = tuple((host, port) for host, port in ranks)
                del invalid["remote_ranks"]
        if isinstance(aborted := params.get("aborted_request"), list):
            values["aborted_request"] = tuple(
                name for name in aborted[:MAX_ABORTED] if isinstance(name, str)
            )
        source = ("metaserver",) if "metaserver" in params else SOURCE
        reader = READER if "remote_reader" in params else ()
        return cls(
            **values,
            do_remote_prefill=bool(params.get("do_remote_prefill")),
            do_remote_decode=bool(params.get("do_remote_decode")),
            remote_protocol=params.get("remote_protocol"),
            invalid_source=next((invalid[key] for key in source if key in invalid), ""),
            invalid_reader=next((invalid[key] for key in reader if key in invalid), ""),
            names_source=not params.keys().isdisjoint(("metaserver", *SOURCE)),
        )

    @property
    def source(self) -> Source | None:
        """The blocks that are named; None if a router is to find an instance."""
        if self.metaserver is not None:
            return None
        assert self.remote_engine_id is not None
        assert self.remote_request_id is not None
        return Source(self.remote_engine_id, self.remote_request_id, self.remote_ranks or ())

    def signed(self) -> bytes:
        """The bytes that the signature covers."""
        return json.dumps([getattr(self, key) for key in SIGNED]).encode()

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON represents them."""
        values = {key: value for key in KEYS if (value := getattr(self, key)) is not None}
        if self.remote_ranks is not None:
            values["remote_ranks"] = [list(rank) for rank in self.remote_ranks]
        return values


NO_PARAMS = TransferParams()

KEYS = tuple(
    each.name for each in fields(TransferParams) if not each.name.startswith(("invalid_", "names_"))
)


def end_remote_prefill(request: Any) -> None:
    """Note in vLLM's request that its prompt is loaded, or computed here, as vLLM's own connectors
    do: vLLM counts the requests that wait for a load by this key."""
    request.kv_transfer_params["do_remote_prefill"] = False


def _is_usable(value: Any) -> bool:
    """Whether a text is not too long for a message, and a number can be calculated with."""
    if isinstance(value, str):
        return len(value) <= MAX_NAME
    return abs(value) < MAX_NUMBER


def _are_ranks(ranks: list[Any]) -> bool:
    return 0 < len(ranks) <= MAX_RANKS and all(
        isinstance(rank, (list, tuple))
        and list(map(type, rank)) == [str, int]
        and len(rank[0]) <= MAX_NAME
        and 0 < rank[1] <= MAX_PORT
        for rank in ranks
    )
