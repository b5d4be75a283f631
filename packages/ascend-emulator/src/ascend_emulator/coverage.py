# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""State of every name that the installed torch_npu can look up: computed, bookkeeping, or
refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ascend_emulator import build, cann_names, text_tables


@dataclass(frozen=True)
class EntryPoint:
    """One CANN name.

    Attributes:
        name: the C symbol; an aclnn operator's two symbols count as one.
        effect: effect of a successful call: ``computed``, ``answers`` through its outputs,
            ``keeps`` or releases host state, ``nothing``; or ``refuses``.
        why: reason why ``nothing`` is correct; empty for other effects.
        family: source file below csrc, without suffix; empty if it refuses.
        asked: whether the installed torch_npu can look it up. Legacy graph operators
            (``aclop::Fill``) are the names of a table that one function reads, which nothing looks
            up.
    """

    name: str
    family: str
    effect: str
    why: str
    asked: bool

    @property
    def state(self) -> str:
        """``computed``, ``bookkeeping`` or ``refuses``."""
        return self.effect if self.effect in ("computed", "refuses") else "bookkeeping"


def ask(function: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text that a function of the emulator's library returns, in a process of its own, because
    the library needs torch's libraries.

    Args:
        environ: the variables of that process.
    """
    script = (
        "import ctypes, sys\n"
        "for path in sys.argv[2:]: library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)\n"
        "function = getattr(library, sys.argv[1])\n"
        "function.restype = ctypes.c_char_p\n"
        "print(function().decode())"
    )
    libraries = build.library_dir()
    paths = [build.torch_dir() / "lib" / "libtorch_cpu.so", libraries / f"lib{build.CORE}.so"]
    return subprocess.run(
        [sys.executable, "-c", script, function, *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
        env=dict(environ),
    ).stdout.strip()


@cache
def _registry() -> dict[str, tuple[str, str, str]]:
    """Name to (family, effect, why)."""
    listing = ask("ascend_emulator_registry")
    lines = (line.split(" ", 3) for line in listing.splitlines() if line)
    # The reason is missing where strip() took the last line's blank.
    return {name: (family, effect, "".join(why)) for name, family, effect, *why in lines}


def entry_points() -> list[EntryPoint]:
    """All names that torch_npu can look up, that CANN declares for other programs, or that the
    emulator implements, sorted."""
    asked = {cann_names.operator(name) for name in cann_names.wheel_names()} | set(
        cann_names.atb_operators()
    )
    have = _registry()
    names = asked | have.keys() | cann_names.public_names().keys()
    return [
        EntryPoint(name, *have.get(name, ("", "refuses", "")), name in asked)
        for name in sorted(names)
    ]


def _group(name: str) -> str:
    groups = {
        "aclnn": "operators (aclnn)",
        "Atb": "operators (ATB)",
        "atb::": "operators (ATB)",
        "aclrt": "runtime (aclrt)",
        "aclmdl": "graphs (aclmdl)",
        "Hccl": "collectives (Hccl)",
        "aclprof": "profiling (aclprof)",
        "aclop": "legacy operators (aclop)",
    }
    return next((label for prefix, label in groups.items() if name.startswith(prefix)), "other")


def report(markdown: bool = False) -> str:
    """The report as text: a table of sums, then all computed and bookkeeping names by
    source file."""
    points = [point for point in entry_points() if point.asked]
    states = ("computed", "bookkeeping", "refuses")
    counts = Counter((_group(point.name), point.state) for point in points)
    rows = [
        [group, *(str(counts[group, state]) for state in states)]
        for group in sorted({_group(point.name) for point in points})
    ]
    totals = Counter(point.state for point in points)
    rows.append(["all", *(str(totals[state]) for state in states)])
    lines = (text_tables.markdown if markdown else text_tables.aligned)(["", *states], rows)
    families: dict[str, list[str]] = {}
    for point in entry_points():
        if point.state != "refuses" and (point.asked or point.name.startswith("aclop::")):
            families.setdefault(point.family, []).append(point.name)
    lines.append("")
    for family, names in sorted(families.items()):
        lines.append(
            f"**{family}**: {', '.join(names)}\n" if markdown else f"{family}: {' '.join(names)}"
        )
    return os.linesep.join(lines)
