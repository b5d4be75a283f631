# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Code that the emulator's tests share: a comparison with the CPU in float64, and processes of
their
own."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

# Every operator and call that this process or one that it starts carries out leaves its name here
# (test_coverage.py reads it).
TRACES = Path(tempfile.mkdtemp(prefix="ascend-emulator-"))
os.environ["ASCEND_EMULATOR_CALLS"] = str(TRACES / "calls")
EMULATED = "libascend_emulator.so" in Path("/proc/self/maps").read_text()
if EMULATED:  # They are already in use, because importing torch makes calls.
    ctypes.CDLL("libascend_emulator.so").ascend_emulator_note_calls(
        os.environ["ASCEND_EMULATOR_CALLS"].encode()
    )


def pytest_sessionfinish() -> None:
    """Here and not at exit, which forked children have too."""
    shutil.rmtree(TRACES, ignore_errors=True)


sys.path.append(str(Path(__file__).parent))  # for memory_calls.py, which test files share
LEFT_OUT = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def whole_session(request: pytest.FixtureRequest) -> bool:
    """Whether all tests of this directory run in this session."""
    directory, collected = Path(__file__).parent, {item.path for item in request.session.items}
    return set(directory.glob("test_*.py")) <= collected and not request.config.stash.get(
        LEFT_OUT, False
    )


# NPUGraph::capture_end of these torch_npu throws before it takes a failed capture out of the
# allocator's list: with 2.10 the process captures nothing more, with 2.11 it aborts when a MemPool
# ends (docs/emulator.md).
FAILED_CAPTURES_REMAIN = importlib.metadata.version("torch-npu").startswith(("2.10.", "2.11."))
ALONE = "TEST_IN_A_PROCESS_OF_ITS_OWN"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fails_a_capture: has a process of its own if torch_npu is affected by failed captures",
    )


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that fails a capture, in a process of its own where later tests would notice."""
    if (
        not FAILED_CAPTURES_REMAIN
        or ALONE in os.environ
        or not pyfuncitem.get_closest_marker("fails_a_capture")
    ):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environ = os.environ | {ALONE: "1"}
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The check that every entry point was run comes last of this directory's tests."""
    last = [item for item in items if item.name == "test_every_entry_point_was_run"]
    indices = [
        place
        for place, item in enumerate(items)
        if item.path.parent == Path(__file__).parent and item not in last
    ]
    if last and indices:
        items.insert(indices[-1] + 1, last[0])  # First after its old position, then elsewhere.
        items.remove(last[0])


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember whether tests of this directory were left out (test_coverage.py asks)."""
    if any(item.path.parent == Path(__file__).parent for item in items):
        items[0].config.stash[LEFT_OUT] = True


@pytest.fixture(scope="session", autouse=True)
def emulated() -> None:
    """These tests are about the emulator: on a real NPU (``--npus 0``) there is nothing for them to
    do."""
    if not EMULATED:
        pytest.skip("no NPU is emulated")


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _to_npu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the NPU with the same strides and offset, which ``tensor.npu()`` would
    straighten out."""
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    return whole.npu().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.fixture(scope="session")
def agree() -> Callable[..., None]:
    """``agree(function, *args, ulps=4)``: it gives on the NPU what it gives on the CPU.

    Shape and dtype are those of the CPU run with the same arguments, values those of a run with
    float64 instead of other floating types, within ``ulps`` units in the last place (relative, or
    absolute below one).
    """

    def compare(function: Callable[..., Any], *args: Any, ulps: float = 4) -> None:
        form = tree_leaves(function(*tree_map_only(torch.Tensor, torch.clone, args)))
        expected = tree_leaves(function(*tree_map_only(torch.Tensor, _widen, args)))
        actual = tree_leaves(function(*tree_map_only(torch.Tensor, _to_npu, args)))
        assert len(actual) == len(form)
        for ours, like, wide in zip(actual, form, expected, strict=True):
            if not isinstance(like, torch.Tensor):
                assert ours == like
                continue
            assert ours.is_npu
            assert (ours.shape, ours.dtype) == (like.shape, like.dtype)
            bound = ulps * torch.finfo(like.dtype).eps if like.is_floating_point() else 0
            # Saturated as a conversion to the type would: 1e6 is infinite in float16.
            reference = wide.to(like.dtype).to(wide.dtype)
            torch.testing.assert_close(
                ours.cpu().to(wide.dtype), reference, atol=bound, rtol=bound, equal_nan=True
            )

    return compare


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(*arguments, **environment)``: ``ascend-emulator`` with these arguments in a process of
    its own, output captured.

    The environment is this one without what the emulator put there; an empty value takes a variable
    out.
    """
    kept = ("ASCEND_EMULATOR_CALLS", "ASCEND_EMULATOR_SANITIZE")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith("ASCEND_")
    }
    variables["LD_LIBRARY_PATH"] = ""

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ascend_emulator.cli", *arguments]
        environ = {name: value for name, value in (variables | environment).items() if value}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=environ, check=False
        )

    return start


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, exact in every type."""
    return ((torch.arange(output.numel()) % 7 - 3) / 4).view(output.shape).to(output)


@pytest.fixture(scope="session")
def agree_backward(agree: Callable[..., None]) -> Callable[..., None]:
    """``agree_backward(function, *args)``: as ``agree``, and the gradients of all floating
    arguments agree too."""

    def compare(function: Callable[..., Any], *args: Any, ulps: float = 8) -> None:
        def call(*variables: Any) -> list[torch.Tensor]:
            variables = tree_map_only(
                torch.Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), variables
            )
            inputs = [
                leaf
                for leaf in tree_leaves(variables)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            outputs = tree_leaves(function(*variables))
            smooth = [output for output in outputs if output.requires_grad]
            slopes = torch.autograd.grad(
                smooth, inputs, [_cotangent(output) for output in smooth], materialize_grads=True
            )
            return [*(output.detach() for output in outputs), *slopes]

        agree(call, *args, ulps=ulps)

    return compare


@pytest.fixture(scope="session")
def calls():
    """Operators by name, in this process."""
    import torch
    from cann_calls import Calls

    torch.npu.current_device()
    return Calls()
