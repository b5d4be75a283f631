"""Secret that instances share, from a file or an environment variable."""

import os
from pathlib import Path

MIN_SECRET_BYTES = 16
"""Minimum length of a secret."""


def find_secret(path: str | None, variable: str) -> bytes:
    """The content of the file, without a path that of the environment variable; without surrounding white space.

    Raises:
        OSError: the file cannot be read.
    """
    return (Path(path).read_bytes() if path else os.environ.get(variable, "").encode()).strip()
