# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Installed distributions: versions, declared requirements, and conflicting wheels.

The environment variable VLLM_VERSION replaces vLLM's version throughout, for people who run a
modified vLLM.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ascend_platform.errors import Problem
from ascend_platform.plugins import COMPONENTS

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILT_FOR_TORCH = ("torchvision", "torchaudio")
"""Packages with libraries that are linked against those of one version of torch."""


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
    """A declared requirement that is not met. ``installed`` is the version found, or "";
    ``distribution`` is the wheel that declares it."""

    requirement: Requirement
    installed: str
    distribution: str

    @property
    def problem(self) -> Problem:
        """In words, with the command that installs what is required.

        Wheels of this family are upgraded together: another version of one of them would not meet
        the requirements of the others.
        """
        wanted = _text(self.requirement)
        found = f"found {self.installed}" if self.installed else "which is not installed"
        fix = install_command(self.requirement)
        if self.requirement.name in COMPONENTS and self.installed:
            fix = upgrade_command(self.distribution)
        return Problem(f"requires {wanted}, {found}", fix)


def all_unmet(distribution: str) -> Iterator[Unmet]:
    """The declared requirements of an installed wheel that are not met."""
    for requirement in declared(distribution):
        installed = version(requirement.name)
        if not installed or not requirement.specifier.contains(installed, prereleases=True):
            yield Unmet(requirement, installed, distribution)


def unmet(distribution: str) -> Problem | None:
    """The first declared requirement of an installed wheel that is not met."""
    first = next(all_unmet(distribution), None)
    return first.problem if first else None


def required_by_platform(name: str) -> Requirement:
    """Version range of a distribution that ascend-platform requires."""
    of_platform = (each for each in declared("ascend-platform") if each.name == name)
    return next(of_platform, Requirement(name))


def upgrade_command(*others: str) -> str:
    """The command that upgrades all installed wheels of this family together, and others."""
    family = ["vllm-ascend-all"] if version("vllm-ascend-all") else [*filter(version, COMPONENTS)]
    names = dict.fromkeys((*family, *(each for each in others if each not in COMPONENTS)))
    return f"pip install --upgrade {' '.join(names)}"


def install_command(requirement: Requirement) -> str:
    """The command that installs a requirement.

    vLLM is built from source: its wheels are for CUDA and require CUDA packages. torch comes from
    PyTorch's index of CPU builds: on PyPI it is the CUDA build, beside which torch_npu cannot be
    loaded. Installed packages that are built for a version of torch are replaced together with it.
    """
    install, text = "pip install", f"'{_text(requirement)}'"
    if requirement.name == "vllm":
        build = "VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1"
        return f"{build} {install} --no-binary vllm {text}"
    others = [name for name in BUILT_FOR_TORCH if version(name)]
    exact = re.fullmatch(r"==(\d+\.\d+\.\d+)(?:\.\*)?", str(requirement.specifier))
    if requirement.name == "torch" and exact:
        text = cpu_build("torch", exact[1])
        others = [built_for_torch(name, exact[1]) for name in others]
    if requirement.name in ("torch", "torch-npu"):
        option = "--index-url" if requirement.name == "torch" else "--extra-index-url"
        return f"{install} {' '.join([text, *others])} {option} {CPU_INDEX}"
    return f"{install} {text}"


def cpu_build(name: str, release: str) -> str:
    """The CPU build of a release on PyTorch's index, as an argument of pip.

    On x86_64 it is a local version there. Without that, pip takes the CUDA build where its
    configuration has another index and PyTorch's does not answer, and reports success.
    """
    local = "+cpu" if platform.machine() == "x86_64" else ""
    return f"'{name}=={release}{local}'"


def built_for_torch(name: str, release: str) -> str:
    """torchvision or torchaudio for a release of torch, as an argument of pip.

    torchvision 0.28.0 is for torch 2.13.0, and so on. torchaudio has no version for each torch.
    """
    numbers = re.fullmatch(r"2\.(\d+)\.(\d+)", release)
    if name != "torchvision" or not numbers:
        return name
    return cpu_build(name, f"0.{int(numbers[1]) + 15}.{numbers[2]}")


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
