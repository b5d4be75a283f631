# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metadata from the scheduler to the workers: endpoints once, and the metadata of each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from ascend_kv_connector.p2p.transfers import Source


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Handshake metadata of a worker: ``port`` of its producer, ``consumer_port`` of its consumer;
    0 without one. ``engine`` is the instance's name for others."""

    host: str
    port: int
    consumer_port: int = 0
    engine: str = ""


@dataclass
class Load:
    """Load of tokens ``start`` to ``stop`` into ``blocks``; the first holds token
    ``start``.

    ``source`` is None for a layer-by-layer load, whose producer sends PrefillStarted.
    """

    source: Source | None
    blocks: list[int]
    start: int
    stop: int


@dataclass
class LayerwisePrefill:
    """Prefill of a prompt of ``total`` tokens for a consumer whose request is ``reader`` and whose
    ranks are ``reader_ranks``.

    After this step its first ``tokens`` are in ``blocks``.
    """

    reader: str
    reader_ranks: tuple[tuple[str, int], ...]
    total: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    announced: bool = False


@dataclass
class P2PMetadata(KVConnectorMetadata):
    """Connector metadata of one step for the workers.

    ``loads``: loads to start, by request. ``leases``: blocks to keep and their number of tokens, by
    request. ``released``: sources whose blocks are no longer needed. ``layerwise``: prefills of
    this step with a waiting consumer. ``revoked``: prefills whose blocks are taken back, with the
    reason, "" for a preemption. ``aborted``: loads whose request ended. ``failed_loads``: loads
    that no prefill instance will serve, with the cause. ``cancelled``: prefills with a waiting
    consumer that will not run. ``step``: number of this step if it computes prompts that consumers
    may load, otherwise 0. ``written``: the step in which the last tokens of a lease were computed.
    ``ranks``: (host, port) of this instance's producers. ``renewed``: sources that requests wait
    for. ``unwanted``: finished requests whose blocks no instance will load.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    released: list[Source] = field(default_factory=list)
    layerwise: dict[str, LayerwisePrefill] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    failed_loads: dict[str, str] = field(default_factory=dict)
    cancelled: list[tuple[LayerwisePrefill, str]] = field(default_factory=list)
    step: int = 0
    written: dict[str, int] = field(default_factory=dict)
    ranks: list[tuple[str, int]] = field(default_factory=list)
    renewed: list[Source] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)


class Outbox:
    """Metadata of the next step, which the roles fill."""

    def __init__(self) -> None:
        self.metadata = P2PMetadata()

    def take(self) -> P2PMetadata:
        metadata, self.metadata = self.metadata, P2PMetadata()
        return metadata
