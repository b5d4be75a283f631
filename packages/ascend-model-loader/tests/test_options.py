# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Validation of ``--model-loader-extra-config``, and where the secret is read from."""

from pathlib import Path
from typing import Any

import pytest
from ascend_model_loader import options
from ascend_platform import extension


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(options.SECRET_ENV, raising=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be an object, not []; fix: write {…} there"),
        ({"peer": []}, "has no key 'peer'; fix: use 'peers'"),
        ({"xyz": 1}, "has no key 'xyz'; fix: use one of busy_timeout, checksum, connect_timeout"),
        (
            {"secret": "0123456789abcdef"},
            "has no key 'secret'; fix: put the secret into a file named by secret_file, or into VLLM_",
        ),
        ({"port": 70000}, ".port is 70000; supported: an integer from 0 to 65535; fix: "),
        ({"port": "28500"}, ".port is '28500'; supported: an integer from 0 to 65535; fix: "),
        ({"timeout": 0}, ".timeout is 0; supported: a number above 0 (seconds); fix: "),
        ({"stream": "fast"}, ".stream is 'fast'; supported: auto, runai_streamer, multithread;"),
        (
            {"strategies": ["peer", "peer"]},
            (
                ".strategies is ['peer', 'peer']; supported: peer, stream and default, each at most"
                " once"
            ),
        ),
        (
            {"strategies": []},
            ".strategies is []; supported: peer, stream and default, each at most once",
        ),
        ({"peers": ["nowhere"]}, ".peers has 'nowhere'; fix: write host:port"),
        ({"peers": ["a:b"]}, ".peers has 'a:b'; fix: write host:port"),
        ({"peers": ["a:0"]}, ".peers has 'a:0'; fix: write host:port"),
        (
            {"peers": ["a:1"], "strategies": ["stream", "default"]},
            (
                ".peers is ['a:1'], and strategies is ['stream', 'default'], without peer; fix: add"
                " peer to strategies, or remove peers"
            ),
        ),
        (
            {"registry": "/somewhere", "strategies": ["default"]},
            (
                ".registry is '/somewhere', and strategies is ['default'], without peer, and"
                " serve_weights is off; fix: add peer to strategies, set serve_weights, or remove"
                " registry"
            ),
        ),
        (
            {"serve_weights": True},
            "needs a secret of at least 16 bytes; fix: set secret_file or VLLM_ASCEND_WEIGHTS_SECRET",
        ),
        ({"peers": ["a:1"]}, "needs a secret of at least 16 bytes"),
        ({"registry": "/somewhere"}, "needs a secret of at least 16 bytes"),
        (
            {"peers": ["a:1"], "secret_file": "/nowhere"},
            ".secret_file /nowhere cannot be read: No such file or directory",
        ),
    ],
)
def test_invalid_options_are_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(extension.RefusedError) as caught:
        options.parse_options(given)
    assert str(caught.value).startswith(
        f"--model-loader-extra-config{message if message[0] == '.' else f' {message}'}"
    )
    assert "\n" not in str(caught.value)


def test_defaults_are_valid() -> None:
    assert options.parse_options({}) == options.Options()


def test_secret_file_takes_precedence_over_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text("of the file, of the file\n")
    monkeypatch.setenv(options.SECRET_ENV, "of the variable, 16 bytes")
    of_file = options.read_secret(
        options.parse_options({"secret_file": str(path), "serve_weights": True})
    )
    assert options.read_secret(options.parse_options({"serve_weights": True})) != of_file
    monkeypatch.setenv(options.SECRET_ENV, "of the file, of the file")
    assert options.read_secret(options.parse_options({"serve_weights": True})) == of_file


@pytest.mark.parametrize(
    ("text", "expected"), [("a.b:1", ("a.b", 1)), ("[::1]:65535", ("::1", 65535))]
)
def test_parse_address(text: str, expected: tuple[str, int]) -> None:
    assert options.parse_address(text) == expected
