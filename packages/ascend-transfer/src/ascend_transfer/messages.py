# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Messages of :mod:`ascend_transfer.rpc`: msgpack, decoded into known types only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

LONGEST_MESSAGE = 1 << 20
"""Bytes; a longer message closes its connection (ZMQ_MAXMSGSIZE)."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages; on the wire the class's name identifies the type."""


class Ack(Message, frozen=True):
    """Reply without content."""


class Refused(Message, frozen=True):
    """Negative reply. ``again``: the same query may succeed a moment later; ``kind`` is one of
    errors.KINDS.

    ``queued``: it keeps its position in the peer's queue if it is repeated at once.
    """

    kind: str
    cause: str
    again: bool = False
    queued: bool = False


class Codec:
    """Queries and replies of a port: unions of message types."""

    def __init__(self, queries: Any, replies: Any) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode_query = _decoder(queries)
        self.decode_reply = _decoder(replies)


def _decoder(types: Any) -> Callable[[bytes], Any]:
    """Decodes a message of these types; any bytes of a peer raise only errors of msgspec."""
    decode = msgspec.msgpack.Decoder(types).decode

    def decode_message(content: bytes) -> Any:
        try:
            return decode(content)
        except (RecursionError, UnicodeDecodeError) as error:
            raise msgspec.DecodeError(str(error)) from None

    return decode_message
