# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Progress of the prefills that consumers read layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ascend_kv_connector.p2p.scheduler.metadata import LayerwisePrefill, P2PMetadata


class LayerwisePrefills(dict[str, LayerwisePrefill]):
    """Prefills with a waiting consumer, by request."""

    def record(self, scheduled: Any, metadata: P2PMetadata) -> None:
        """Record the tokens and blocks of a step."""
        if not self:
            return
        for name in scheduled.preempted_req_ids or ():
            if name in self:
                self[name].blocks, self[name].tokens = [], 0
                metadata.revoked[name] = ""
        for name, tables, computed, resumed in _steps(scheduled):
            prefill = self.get(name)
            if prefill is None or (prefill.tokens >= prefill.total and not resumed):
                continue
            (blocks,) = tables or ([],)
            prefill.blocks = list(blocks) if resumed else prefill.blocks + blocks
            prefill.tokens = min(prefill.total, computed + scheduled.num_scheduled_tokens[name])
            metadata.layerwise[name] = replace(prefill)
            prefill.announced = True


def _steps(scheduled: Any) -> Iterator[tuple[str, Any, int, bool]]:
    """Of each request its name, new block tables, computed tokens, and whether the tables replace
    those before."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.block_ids, new.num_computed_tokens, True
    old = scheduled.scheduled_cached_reqs
    for name, tables, computed in zip(
        old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
    ):
        yield name, tables, computed, name in old.resumed_req_ids
