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


def write_vllm_ascend(directory: Path) -> None:
    """Write the metadata of vllm-ascend 0.18, whose plugins have the names of ours."""
    points = (
        "[vllm.platform_plugins]\nascend ="
        " vllm_ascend:register\n[vllm.general_plugins]\nascend_kv_connector = vllm_ascend:a\n"
    )
    write_metadata(directory, "vllm-ascend", "0.18.0", entry_points=points)


def write_cuda_torch(directory: Path) -> None:
    """Write this environment's torch and, in its lib, the library that only torch's CUDA build
    has."""
    import torch

    here = Path(torch.__file__).parent
    there = directory / "torch"
    for source, names in ((here, there), (here / "lib", there / "lib")):
        names.mkdir()
        for entry in source.iterdir():
            if entry.name != "lib":
                (names / entry.name).symlink_to(entry)
    (there / "lib" / "libc10_cuda.so").write_bytes(
        (here / "lib" / "libc10.so").read_bytes() + b"pinned_reserve_segment_size_mb"
    )
