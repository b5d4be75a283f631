# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Secret that instances share, from a file or an environment variable."""

import errno
import functools
import hashlib
import os
import stat

from ascend_platform.extension import RefusedError, logger

MIN_SECRET_BYTES = 16
"""Minimum length of a secret."""


def read_secret(path: str | None, variable: str, option: str) -> bytes:
    """Key derived from the content of the file, without a path from that of the environment
    variable; b"" if that is not set.

    White space around it is ignored. The derivation costs 0.1 s and 32 MiB, so that a secret that
    was chosen by a person is not found by trying guesses on what its holders have signed.
    ``option`` is the name of the option with the path, for messages. A file that other users of this
    machine may read is warned of.

    Raises:
        RefusedError: the file cannot be read, or the secret is shorter than 16 bytes, in one line.
    """
    source = f"{option} {path}" if path else variable
    try:
        content, mode = read_file(path) if path else (os.environ.get(variable, "").encode(), 0)
        found = content.strip()
    except OSError as error:
        raise RefusedError(
            f"{source} cannot be read: {error.strerror}; fix: name another file"
        ) from None
    if len(found) < MIN_SECRET_BYTES and (found or path):
        raise RefusedError(
            f"{source} has a secret of {len(found)} bytes; fix: use one of at least"
            f" {MIN_SECRET_BYTES}"
        )
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        logger.warning(
            "%s has mode %o: all users of this machine may read the secret; fix: chmod 600 it, or"
            " mount it for this user only",
            source,
            mode,
        )
    return _derive(found) if found else b""


def read_file(path: str) -> tuple[bytes, int]:
    """Content and mode of a regular file; a FIFO or device of that name is not waited for.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(), stat.S_IMODE(status.st_mode)


@functools.cache
def _derive(secret: bytes) -> bytes:
    # The name that the library had before: instances of both forms accept each other.
    return hashlib.scrypt(
        secret, salt=b"ascend_platform.transfer", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32
    )
