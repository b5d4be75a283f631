# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache groups of an instance, and their block tables joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_kv_connector.p2p.paged_cache import group_block_table
from ascend_kv_connector.p2p.states import LAST_STATE, join_tables

NO_LAYERWISE_WINDOWS = (
    "layer-by-layer transfers do not support sliding windows; use --disable-hybrid-kv-cache-manager"
)

NO_LAYERWISE_STATES = (
    "layer-by-layer transfers do not support states of linear attention and state-space layers"
)


@dataclass(frozen=True)
class CacheGroups:
    """``windows`` has each group's sliding window, 0 without one, LAST_STATE for states; a block
    has ``block_size`` tokens. States of drafts take ``draft_blocks``."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    draft_blocks: int = 0

    @property
    def is_hybrid(self) -> bool:
        return self.windows != (0,)

    @property
    def has_states(self) -> bool:
        return LAST_STATE in self.windows

    @property
    def no_layerwise(self) -> str:
        """Why hybrid groups are not transferred layer by layer."""
        return NO_LAYERWISE_STATES if self.has_states else NO_LAYERWISE_WINDOWS

    def join(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        return join_tables(tables, self.windows, self.draft_blocks, tokens, self.block_size)

    def split(self, blocks: list[int]) -> list[Sequence[int]]:
        """The groups' tables of a joined one."""
        return [
            group_block_table(blocks, group, len(self.windows))
            for group in range(len(self.windows))
        ]

    def windows_complete(self, blocks: list[int], tokens: int) -> bool:
        """Whether the sliding windows still hold what a consumer needs to compute the last token.

        vLLM has freed blocks outside of the window of the next token, which is one more if the
        window starts a block there.
        """
        return all(
            not window
            or table[
                (tokens - 1 if window == LAST_STATE else max(0, tokens - window)) // self.block_size
            ]
            for table, window in zip(self.split(blocks), self.windows, strict=True)
        )
