# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Builds of torch, torchvision and torchaudio. On x86_64, PyPI has builds for CUDA, which cannot
be used with torch_npu."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ascend_platform.errors import Problem
from ascend_platform.plugins.requirements import (
    BUILT_FOR_TORCH,
    CPU_INDEX,
    all_unmet,
    built_for_torch,
    cpu_build,
    unmet,
    version,
)

_OPTION = b"pinned_reserve_segment_size_mb"
_CUDA = "libtorch_cuda.so"


def cuda_torch() -> Problem | None:
    """torch's CUDA build beside torch_npu: both register one option of the allocator, and the
    process aborts at import.

    The first error is ``Duplicated key 'pinned_reserve_segment_size_mb'``, of C++, so that nothing
    can catch it. A library of that name without the option, which some CPU builds have instead of
    that of CUDA, does no harm. The fix names the packages built for this torch too, which could not
    be imported with the CPU build (:func:`cuda_extensions`).
    """
    libraries = [each / "lib" / "libc10_cuda.so" for each in _directories("torch")]
    if not _directories("torch_npu") or not any(
        each.exists() and _OPTION in each.read_bytes() for each in libraries
    ):
        return None
    effect = "beside which importing torch_npu aborts the process"
    found = f"torch {version('torch')} is the CUDA build, {effect}"
    mismatch = next(all_unmet("torch-npu"), None)
    if mismatch and mismatch.requirement.name == "torch":
        return Problem(found, mismatch.problem.fix)  # another version, not only another build
    return Problem(found, _reinstall("torch", *filter(_is_for_cuda, BUILT_FOR_TORCH)))


def cuda_extensions() -> Problem | None:
    """torchvision or torchaudio built for CUDA beside another build of torch.

    Their libraries need one of torch's CUDA build, so importing them fails: with ``operator
    torchvision::nms does not exist``, or with an OSError that names a library. transformers and
    vLLM import them for any model.
    """
    if any((each / "lib" / _CUDA).exists() for each in _directories("torch")):
        return None
    names = [*filter(_is_for_cuda, BUILT_FOR_TORCH)]
    if not names or not _directories("torch"):
        return None
    found = " and ".join(f"{name} {version(name)}" for name in names)
    effect = f"built for CUDA, and cannot be imported with torch {version('torch')}"
    fix = install_command(*names) if any(map(unmet, names)) else _reinstall(*names)
    return Problem(f"{found} {'are' if names[1:] else 'is'} {effect}", fix)


def unusable_extensions() -> Problem | None:
    """torchvision or torchaudio that is built for CUDA, or for another version of torch."""
    if problem := cuda_extensions():
        return problem
    for name in BUILT_FOR_TORCH:
        if version(name) and (problem := unmet(name)):
            return Problem(f"{name} {version(name)} {problem.found}", install_command(name))
    return None


def install_command(*names: str) -> str:
    """The command that installs the CPU builds of torchvision or torchaudio for the installed
    torch, which pip would replace without its pin."""
    torch = _release("torch")
    pins = " ".join([*(built_for_torch(name, torch) for name in names), f"'torch=={torch}'"])
    return f"pip install --upgrade {pins} --index-url {CPU_INDEX}"


def unloadable(name: str) -> Problem:
    """A package whose libraries cannot be loaded, for an unknown reason."""
    found = f"{name} {version(name)} cannot be loaded with torch {version('torch')}"
    return Problem(found, _reinstall(name))


def _is_for_cuda(package: str) -> bool:
    return any(_CUDA.encode() in library.read_bytes() for library in _libraries(package))


def _libraries(package: str) -> Iterator[Path]:
    for directory in _directories(package):
        yield from directory.glob("*.so")
        yield from directory.glob("lib/*.so")


def _directories(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(each) for each in (spec and spec.submodule_search_locations) or ()]


def _reinstall(*names: str) -> str:
    """Command that replaces these packages by the CPU builds of the same versions, and nothing
    else: what they require is installed."""
    pins = " ".join(cpu_build(name, _release(name)) for name in names)
    return f"pip install --force-reinstall --no-deps {pins} --index-url {CPU_INDEX}"


def _release(name: str) -> str:
    return version(name).partition("+")[0]
