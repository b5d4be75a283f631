# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fingerprints of checkpoints and adapters, and the secret of instances."""

import json
import os
import pickle
import shutil
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.extension import RefusedError
from ascend_transfer.checkpoint import (
    adapter_files,
    adapter_fingerprint,
    checkpoint_fingerprint,
    loaded_fingerprint,
    note_files,
)
from ascend_transfer.secret import read_secret
from safetensors.torch import save_file


def checkpoint(path: Path, change: tuple[str, int] | None = None) -> Path:
    path.mkdir()
    draw = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.rand(size, generator=draw)
        for name, size in {"a": 10_000, "b": 5, "c": 70_000}.items()
    }
    if change:
        tensors[change[0]][change[1]] += 1
    save_file({"a": tensors["a"]}, path / "1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, path / "2.safetensors")
    return path


@pytest.mark.parametrize("change", [("a", 0), ("a", 5000), ("a", 9999), ("b", 3), ("c", 69_999)])
def test_fingerprint_depends_on_every_tensor(tmp_path: Path, change: tuple[str, int]) -> None:
    result = checkpoint_fingerprint(checkpoint(tmp_path / "one"))
    assert len(result) == 16
    assert result == checkpoint_fingerprint(checkpoint(tmp_path / "same"))
    assert result != checkpoint_fingerprint(checkpoint(tmp_path / "changed", change))


def test_fingerprint_of_files_that_changed_during_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(model=str(tmp_path / "here"), model_weights="", revision=None)
    checkpoint(tmp_path / "here")
    assert loaded_fingerprint(model) == checkpoint_fingerprint(tmp_path / "here")  # not noted
    note_files(model)
    assert loaded_fingerprint(pickle.loads(pickle.dumps(model))) == checkpoint_fingerprint(
        tmp_path / "here"
    )
    shutil.copy(checkpoint(tmp_path / "new", ("c", 1000)) / "2.safetensors", tmp_path / "here")
    with pytest.raises(
        RefusedError,
        match=r"2\.safetensors of .*here has changed since this instance began to load it.*; fix: ",
    ):
        loaded_fingerprint(model)
    monkeypatch.setattr(
        socket, "gethostname", lambda: "another machine, with its own copy of the files"
    )
    assert loaded_fingerprint(model) == checkpoint_fingerprint(tmp_path / "here")


def test_fingerprint_of_missing_and_malformed_files(tmp_path: Path) -> None:
    assert checkpoint_fingerprint(tmp_path) == checkpoint_fingerprint(tmp_path / "nowhere") == ""
    for number, content in enumerate(
        [b"", b"12345", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"[]"]
    ):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    header = json.dumps({"a": {"data_offsets": "x"}}).encode()
    (tmp_path / "9.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert len(checkpoint_fingerprint(tmp_path)) == 16


def test_fingerprint_of_other_formats(tmp_path: Path) -> None:
    result = set()
    for content in (b"a" * 1_000_000, b"a" * 999_999 + b"b", b"b" + b"a" * 999_999, b"a" * 1000):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        result.add(checkpoint_fingerprint(tmp_path))
    assert len(result) == 4
    assert "" not in result


def test_adapter_fingerprint_covers_every_byte(tmp_path: Path) -> None:
    """And nothing else of the directory."""
    path = tmp_path / "adapter"
    path.mkdir()
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    weights.write_bytes(bytes(3 << 20))
    config.write_text(json.dumps({"r": 8}))
    (path / "README.md").write_text("an adapter")
    result, files = {adapter_fingerprint(str(path))}, {adapter_files(str(path))}
    (path / "README.md").write_text("the same adapter")
    assert {adapter_fingerprint(str(path))} == result
    for at in (0, 2_000_000, (3 << 20) - 1):
        weights.write_bytes(bytes(at) + b"\x01" + bytes((3 << 20) - 1 - at))
        result.add(adapter_fingerprint(str(path)))
    config.write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    result.add(adapter_fingerprint(str(path)))
    files.add(adapter_files(str(path)))
    assert (len(result), len(files)) == (5, 2)
    weights.unlink()
    os.mkfifo(weights)  # not waited for
    assert [name for name, *_ in adapter_files(str(path))] == ["adapter_config.json"]
    for nowhere in ("/nowhere", "nobody/has-this", "s3://bucket/adapter"):
        assert (adapter_files(nowhere), adapter_fingerprint(nowhere)) == ((), "")


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)]
)
def test_secret_that_all_users_may_read_is_warned_of(
    tmp_path: Path, log_lines: list[tuple[str, str]], mode: int, warned: bool
) -> None:
    path = tmp_path / "secret"
    path.write_text("sixteen bytes or more")
    path.chmod(mode)
    assert len(read_secret(str(path), "NONE", "secret_file")) == 32
    assert [
        f"has mode {mode:o}: all users of this machine may read" in line for _, line in log_lines
    ] == [True] * warned


def test_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """And a FIFO is not waited for."""
    os.mkfifo(tmp_path / "fifo")
    for path, cause in (("fifo", "not a regular file"), ("", "Is a directory"), ("x", "No such")):
        with pytest.raises(RefusedError, match=rf"secret_file .* cannot be read: {cause}.*; fix: "):
            read_secret(str(tmp_path / path), "NONE", "secret_file")
