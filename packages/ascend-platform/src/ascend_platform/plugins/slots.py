# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Slots of the platform, and the implementations that components offer for them."""

from __future__ import annotations

_offers: dict[str, str] = {}


def offer(slot: str, implementation: str) -> None:
    """Offer the class of this qualified name for a slot of the platform, for example
    ``attention.dense``.

    Raises:
        ValueError: another implementation has been offered for the slot.
    """
    if _offers.setdefault(slot, implementation) != implementation:
        raise ValueError(
            f"slot {slot} is taken by {_offers[slot]}; {implementation} cannot have it too"
        )


def offered(slot: str) -> str | None:
    """The qualified name offered for a slot, or None."""
    return _offers.get(slot)


def names(family: str) -> list[str]:
    """The names of the slots ``<family>.<name>`` for which there is an implementation, sorted."""
    prefix = f"{family}."
    return sorted(slot.removeprefix(prefix) for slot in _offers if slot.startswith(prefix))
