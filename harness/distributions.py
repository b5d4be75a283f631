# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metadata of a distribution in a directory for PYTHONPATH, as if pip had installed it there."""

from collections.abc import Iterable
from pathlib import Path


def write_metadata(
    directory: Path,
    name: str,
    version: str = "1.0",
    requires: Iterable[str] = (),
    entry_points: str = "",
) -> None:
    """Write the ``.dist-info`` that importlib.metadata reads.

    Args:
        requires: ``Requires-Dist`` entries.
        entry_points: text of ``entry_points.txt``; empty: no such file.
    """
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    info.joinpath("METADATA").write_text("\n".join(lines) + "\n")
    if entry_points:
        info.joinpath("entry_points.txt").write_text(entry_points)
