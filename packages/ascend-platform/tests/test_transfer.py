# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Code shared by KV connector and model loader: fingerprints of checkpoints."""

import json
import pickle
import shutil
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.errors import RefusedError
from ascend_platform.transfer.checkpoint import (
    checkpoint_fingerprint,
    loaded_fingerprint,
    note_files,
)
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
    found = checkpoint_fingerprint(checkpoint(tmp_path / "one"))
    assert len(found) == 16
    assert found == checkpoint_fingerprint(checkpoint(tmp_path / "same"))
    assert found != checkpoint_fingerprint(checkpoint(tmp_path / "changed", change))


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
    found = set()
    for content in (b"a" * 1_000_000, b"a" * 999_999 + b"b", b"b" + b"a" * 999_999, b"a" * 1000):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        found.add(checkpoint_fingerprint(tmp_path))
    assert len(found) == 4
    assert "" not in found
