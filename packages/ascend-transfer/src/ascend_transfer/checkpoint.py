# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fingerprint of a checkpoint's weights: what two instances must share to exchange KV cache or
weights."""

import hashlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

from ascend_platform.extension import RefusedError
from huggingface_hub import try_to_load_from_cache

SAMPLE_BYTES = 256

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""Files with weights that have no header of safetensors."""

SAMPLES_OF_FILE = 4096


Files = tuple[str, list[tuple[str, int, int]]]
"""This machine's name, and name, bytes and time of the last change in ns of each file with weights.
"""

OF_ADAPTER = ("adapter_config.json", "*.safetensors", *OTHER_FORMATS, "*.tensors")
"""Files of an adapter that decide what it computes."""


def note_files(model_config: Any) -> None:
    """Before loading, remember the checkpoint's files in a vLLM ModelConfig, for
    :func:`loaded_fingerprint` of it or a copy."""
    model_config.ascend_checkpoint_files = _files(model_config)


def loaded_fingerprint(model_config: Any) -> str:
    """:func:`weights_fingerprint` of the weights that were loaded since :func:`note_files`.

    Raises:
        RefusedError: the files have changed since then, so that it is not known which weights were
            loaded.
    """
    fingerprint, (machine, now) = weights_fingerprint(model_config), _files(model_config)
    noted_on, noted = getattr(model_config, "ascend_checkpoint_files", ("", []))
    if noted and noted_on == machine and noted != now:
        changed = sorted({name for name, *_ in set(noted) ^ set(now)})
        raise RefusedError(
            f"{changed[0]} of {model_config.model} has changed since this instance began to load"
            " it, which must share neither KV cache nor weights; fix: start it again once the"
            " checkpoint is complete, and write new weights to another directory"
        )
    return fingerprint


def weights_fingerprint(model_config: Any) -> str:
    """:func:`checkpoint_fingerprint` of the checkpoint of a vLLM ModelConfig; "" if this machine
    does not have its files.

    Weights that are replaced in the running engine have the fingerprint of those that were loaded.
    """
    directory = _directory(model_config)
    return checkpoint_fingerprint(directory) if directory else ""


def adapter_files(path: str) -> tuple[tuple[str, int, int], ...]:
    """Name, bytes and time of the last change in ns of each file of a LoRA adapter, which is a
    directory or a repository of Hugging Face's hub; empty if it is not on this machine."""
    directory = _downloaded(path, "adapter_config.json")
    return tuple(sorted(_states(directory, OF_ADAPTER))) if directory else ()


def adapter_fingerprint(path: str) -> str:
    """Hash of all bytes of an adapter's files; "" if they are not on this machine."""
    files = adapter_files(path)
    directory, digest = _downloaded(path, "adapter_config.json"), hashlib.sha256()
    for name, size, _ in files:
        assert directory is not None
        digest.update(f"{name} {size} ".encode())
        with open(directory / name, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()[:16] if files else ""


def _directory(model_config: Any) -> Path | None:
    """Directory of a checkpoint; None if it is not on this machine."""
    name = model_config.model_weights or model_config.model
    return _downloaded(name, "config.json", model_config.revision)


def _downloaded(name: str, file: str, revision: str | None = None) -> Path | None:
    """A directory, or that of a repository which vLLM has downloaded and which has this file; None
    if this machine has neither."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:  # A repository of Hugging Face's hub, which vLLM has downloaded.
        found = try_to_load_from_cache(name, file, revision=revision)
    except ValueError:  # a URL, for example
        return None
    return Path(found).parent if isinstance(found, str) else None


def _files(model_config: Any) -> Files:
    directory = _directory(model_config)
    found = _states(directory, ("*.safetensors", *OTHER_FORMATS)) if directory else []
    return socket.gethostname(), sorted(found)


def _states(directory: Path, patterns: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Name, bytes and time of the last change of a directory's files of these patterns."""
    paths = [path for kind in patterns for path in directory.glob(kind) if path.is_file()]
    return [(path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in paths]


def checkpoint_fingerprint(directory: Path) -> str:
    """Hash of a directory's weights; "" if there are none.

    It covers the headers of safetensors files and the first, middle and last 256 bytes of each
    tensor: reading everything would take as long as loading. Other formats count only without
    safetensors files; of them it covers evenly distributed samples.
    """
    if not directory.is_dir():
        return ""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        others = sorted(path for kind in OTHER_FORMATS for path in directory.glob(kind))
        return _fingerprint_by_samples(others)
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = file.read(min(length, 100_000_000))
            digest.update(b"%d" % path.stat().st_size + head + header)
            for begin, end in _ranges(header):
                for at in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)}):
                    file.seek(8 + length + at)
                    digest.update(file.read(min(SAMPLE_BYTES, end - at)))
    return digest.hexdigest()[:16]


def _fingerprint_by_samples(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(b"%d" % size)
        even = range(0, size, max(1, size // SAMPLES_OF_FILE))
        with open(path, "rb") as file:
            for at in sorted({*even, max(0, size - SAMPLE_BYTES)}):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16] if paths else ""


def _ranges(header: bytes) -> list[tuple[int, int]]:
    try:
        entries: dict[str, Any] = json.loads(header)
        given = (each["data_offsets"] for name, each in entries.items() if name != "__metadata__")
        return sorted((int(begin), int(end)) for begin, end in given)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # loading such a file fails too
