# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Symbols of shared libraries (ELF, 64 bits), read from the files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path

DYNAMIC_SYMBOLS = 11  # type of the section, SHT_DYNSYM


def symbols(library: bytes) -> dict[str, bool]:
    """Dynamic symbols of a library: name to whether the library defines it."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count = struct.unpack_from("<HH", library, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, table + i * size) for i in range(count)]
    defined = {}
    for _, kind, _, _, start, length, strings, *_ in sections:
        if kind == DYNAMIC_SYMBOLS:
            for name, _, _, section, _, _ in struct.iter_unpack(
                "<IBBHQQ", library[start : start + length]
            ):
                first = sections[strings][4] + name
                defined[library[first : library.index(b"\0", first)].decode()] = section != 0
    return defined


def missing(libraries: Iterable[Path], pattern: str) -> list[str]:
    """Symbols that begin with the pattern, and that the libraries ask for and none of them defines,
    sorted."""
    tables = [symbols(path.read_bytes()) for path in libraries]
    defined = {name for each in tables for name, here in each.items() if here}
    return sorted({name for each in tables for name in each if re.match(pattern, name)} - defined)


def readable(symbol: str) -> str:
    """The qualified name of a C++ symbol, without parameters: ``ge::Session::AddGraph``."""
    parts, rest = [], re.sub("^_ZNK?", "", symbol)
    while length := re.match(r"\d+", rest):  # An identifier is preceded by its size.
        end = length.end() + int(length[0])
        parts.append(rest[length.end() : end])
        rest = rest[end:]
    return "::".join(parts)
