# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Installed distributions: versions, declared requirements, and conflicting wheels.

The environment variable VLLM_VERSION replaces vLLM's version throughout, for people who run a
modified vLLM.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ascend_platform.errors import Problem
from ascend_platform.plugins import COMPONENTS

_OPTION = b"pinned_reserve_segment_size_mb"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def version(distribution: str) -> str:
    """The installed version of a distribution, or "" when it is not installed."""
    if distribution == "vllm" and (override := os.environ.get("VLLM_VERSION")):
        return override
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def declared(distribution: str) -> list[Requirement]:
    """The requirements in a wheel's metadata whose markers hold here; none if the wheel is not
    installed. Only ascend-platform states the range of vLLM, which is that of its siblings too."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # a source tree without metadata
    stated = [Requirement(line) for line in lines]
    if distribution in COMPONENTS and distribution != "ascend-platform":
        stated.append(required_by_platform("vllm"))
    return [each for each in stated if not each.marker or each.marker.evaluate({"extra": ""})]


class Unmet(NamedTuple):
    """A declared requirement that is not met. ``installed`` is the version found, or ""."""

    requirement: Requirement
    installed: str

    @property
    def problem(self) -> Problem:
        """In words, with the command that installs what is required."""
        wanted = _text(self.requirement)
        found = f"found {self.installed}" if self.installed else "which is not installed"
        return Problem(f"requires {wanted}, {found}", install_command(self.requirement))


def all_unmet(distribution: str) -> Iterator[Unmet]:
    """The declared requirements of an installed wheel that are not met."""
    for requirement in declared(distribution):
        installed = version(requirement.name)
        if not installed or not requirement.specifier.contains(installed, prereleases=True):
            yield Unmet(requirement, installed)


def unmet(distribution: str) -> Problem | None:
    """The first declared requirement of an installed wheel that is not met."""
    first = next(all_unmet(distribution), None)
    return first.problem if first else None


def required_by_platform(name: str) -> Requirement:
    """Version range of a distribution that ascend-platform requires."""
    of_platform = (each for each in declared("ascend-platform") if each.name == name)
    return next(of_platform, Requirement(name))


def install_command(requirement: Requirement) -> str:
    """The command that installs a requirement.

    vLLM is built from source: its wheels are for CUDA and require CUDA packages. torch comes from
    PyTorch's index of CPU builds: on PyPI it is the CUDA build, beside which torch_npu cannot be
    loaded.
    """
    install, index = "pip install", ""
    if requirement.name == "vllm":
        install = f"VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 {install} --no-binary vllm"
    elif requirement.name in ("torch", "torch-npu"):
        option = "--index-url" if requirement.name == "torch" else "--extra-index-url"
        index = f" {option} {CPU_INDEX}"
    return f"{install} '{_text(requirement)}'{index}"


def cuda_torch() -> Problem | None:
    """torch's CUDA build beside torch_npu: both register one option of the allocator, and the
    process aborts at import.

    The first error is ``Duplicated key 'pinned_reserve_segment_size_mb'``, of C++, so that nothing
    can catch it. A library of that name without the option, which some CPU builds have instead of
    CUDA's, does no harm.
    """
    torch, torch_npu = map(importlib.util.find_spec, ("torch", "torch_npu"))
    directories = torch and torch_npu and torch.submodule_search_locations
    libraries = [Path(each, "lib", "libc10_cuda.so") for each in directories or ()]
    if not any(each.exists() and _OPTION in each.read_bytes() for each in libraries):
        return None
    torch_version = version("torch")
    effect = "beside which importing torch_npu aborts the process"
    install = f"pip install --force-reinstall 'torch=={torch_version.partition('+')[0]}'"
    found = f"torch {torch_version} is the CUDA build, {effect}"
    return Problem(found, f"{install} --index-url {CPU_INDEX}")


@functools.cache
def conflict() -> Problem | None:
    """Another installed wheel with a plugin of the platform's name.

    vLLM keeps one plugin of a name, whichever it finds last (``vllm/plugins/__init__.py``).
    vllm-ascend has that name and others of ours.
    """
    taken: dict[str, list[str]] = {}
    for group in ("vllm.platform_plugins", "vllm.general_plugins"):
        for point in importlib.metadata.entry_points(group=group):
            owner = canonicalize_name(point.dist.name) if point.dist else ""
            if point.name in COMPONENTS.values() and owner and owner not in COMPONENTS:
                taken.setdefault(owner, []).append(point.name)
    for owner, names in taken.items():
        if COMPONENTS["ascend-platform"] in names:
            same = f"plugins of the same name ({', '.join(names)}), of which vLLM keeps one"
            found = f"{owner} {version(owner)} is installed too and has {same}"
            return Problem(found, f"pip uninstall -y {owner}")
    return None


def _text(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"
