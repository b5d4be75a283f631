"""Fingerprint of a checkpoint's weights: what two instances must share to exchange KV cache or weights."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

SAMPLE_BYTES = 256

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""Files with weights that have no header of safetensors."""

SAMPLES_OF_FILE = 4096


def weights_fingerprint(model_config: Any) -> str:
    """:func:`checkpoint_fingerprint` of the checkpoint of a vLLM ModelConfig; "" if this machine does not have its files.

    Weights that are replaced in the running engine have the fingerprint of those that were loaded.
    """
    name = model_config.model_weights or model_config.model
    if not Path(name).is_dir():  # a repository of Hugging Face's hub, which vLLM has downloaded
        try:
            found = try_to_load_from_cache(name, "config.json", revision=model_config.revision)
        except ValueError:  # a URL, for example
            return ""
        return checkpoint_fingerprint(Path(found).parent) if isinstance(found, str) else ""
    return checkpoint_fingerprint(Path(name))


def checkpoint_fingerprint(directory: Path) -> str:
    """Hash of a directory's weights; "" if there are none.

    It covers the headers of safetensors files and the first, middle and last 256 bytes of each tensor: reading everything would
    take as long as loading. Other formats count only without safetensors files; of them it covers evenly distributed samples.
    """
    if not directory.is_dir():
        return ""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        return _fingerprint_by_samples(sorted(path for kind in OTHER_FORMATS for path in directory.glob(kind)))
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
        with open(path, "rb") as file:
            for at in sorted({*range(0, size, max(1, size // SAMPLES_OF_FILE)), max(0, size - SAMPLE_BYTES)}):
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
