# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Secret that instances share, from a file or an environment variable."""

import functools
import hashlib
import os
from pathlib import Path

from ascend_platform.errors import RefusedError

MIN_SECRET_BYTES = 16
"""Minimum length of a secret."""


def read_secret(path: str | None, variable: str, option: str) -> bytes:
    """Key derived from the content of the file, without a path from that of the environment
    variable; b"" if that is not set.

    White space around it is ignored. The derivation costs 0.1 s and 32 MiB, so that a secret that
    was chosen by a person is not found by trying guesses on what its holders have signed.
    ``option`` is the name of the option with the path, for messages.

    Raises:
        RefusedError: the file cannot be read, or the secret is shorter than 16 bytes, in one line.
    """
    source = f"{option} {path}" if path else variable
    try:
        found = (Path(path).read_bytes() if path else os.environ.get(variable, "").encode()).strip()
    except OSError as error:
        raise RefusedError(
            f"{source} cannot be read: {error.strerror}; fix: name another file"
        ) from None
    if len(found) < MIN_SECRET_BYTES and (found or path):
        raise RefusedError(
            f"{source} has a secret of {len(found)} bytes; fix: use one of at least"
            f" {MIN_SECRET_BYTES}"
        )
    return _derive(found) if found else b""


@functools.cache
def _derive(secret: bytes) -> bytes:
    return hashlib.scrypt(
        secret, salt=b"ascend_platform.transfer", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32
    )
