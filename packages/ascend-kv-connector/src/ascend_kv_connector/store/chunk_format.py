# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Format of a pool's records: chunk bytes with a checksum footer, under a name that identifies the
KV cache."""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import zlib
from typing import Any

FOOTER_BYTES = 4096
"""Size of the footer. Chunks are multiples of it, hence records too, as O_DIRECT requires."""

_FOOTER = struct.Struct("<8sQI")
_MAGIC = b"ascendkv"
_FORMAT = "keys, then values, of each layer; [tokens, heads, size]; ranks one behind the other; 1"


def write_footer(name: str, record: memoryview, chunk: memoryview) -> None:
    """Write the footer of a record, uint8 ``[chunk + FOOTER_BYTES]``, whose bytes were copied from
    ``chunk``."""
    size = len(record) - FOOTER_BYTES
    record[size:] = bytes(FOOTER_BYTES)
    _FOOTER.pack_into(record, size, _MAGIC, size, _checksum(name, chunk))


def read_footer(record: memoryview) -> bytes:
    """Footer of a record."""
    return bytes(record[-FOOTER_BYTES : _FOOTER.size - FOOTER_BYTES])


def is_intact(name: str, chunk: memoryview, footer: bytes) -> bool:
    """Whether a chunk, uint8 ``[chunk]``, matches the footer that was written for it under this
    name."""
    magic, size, checksum = _FOOTER.unpack(footer)
    return magic == _MAGIC and size == len(chunk) and checksum == _checksum(name, chunk)


def _checksum(name: str, chunk: memoryview) -> int:
    return zlib.crc32(chunk, zlib.crc32(name.encode()))


class ChunkNames:
    """Names of chunks; equal in two instances only if their KV cache of the prefix has the same
    bytes.

    A name has vLLM's hash of the prefix and a digest. The digest is of all that ``FileMapper`` of
    vLLM's own file tier distinguishes (model, dtype, block sizes, layers, parallel sizes), this
    wheel's format, the hash seed, and the connector's ``identity``.
    """

    def __init__(self, spec: Any, identity: dict[str, Any]) -> None:
        from vllm.v1.core.kv_cache_utils import get_none_hash_seed
        from vllm.v1.kv_offload.file_mapper import FileMapper

        # not agnostic of tensor parallelism
        mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
        seed = hashlib.sha256(get_none_hash_seed().encode()).hexdigest()
        self._known = mapper.get_run_config() | {
            "format": _FORMAT,
            "row": spec.kv_bytes_per_chunk,
            "rank": spec.cpu_page_size_per_worker,
            "seed": seed,
            "identity": identity,
        }
        self._model = mapper.fields["model_name"].rstrip("/").rpartition("/")[2]
        self._update()

    def rotate(self) -> None:
        """Switch to names that were never used."""
        self._known["reset"] = secrets.token_hex(8)
        self._update()

    def _update(self) -> None:
        known = json.dumps(self._known, sort_keys=True, default=str)
        self.prefix = f"{self._model}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"

    def __call__(self, key: bytes) -> str:
        """Name for a vLLM offload key (a hash and a group)."""
        return f"{self.prefix}/{key.hex()}"
