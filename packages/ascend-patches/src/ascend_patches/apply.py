# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Applying patches in this process: when a scope is entered, or when the target's module is
imported later."""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from ascend_platform import extension

from ascend_patches.registry import (
    DISABLE,
    discover,
    environment_disabled,
    in_range,
    obstacle,
    overlap,
)


def register() -> None:
    """Register with ascend-platform; never raises. The entry point of group
    ``vllm.general_plugins``."""
    if not _Process.joined:
        _Process.joined = True
        patches = discover()
        note = f"{len(patches)} patch{'es' * (len(patches) != 1)}"
        take = functools.partial(_setup, patches)
        extension.join(
            "ascend-patches",
            "ascend_patches",
            take,
            note=note,
            options=Options,
            configured=_configured,
            api="1.8",
        )


def enter(scope: str) -> None:
    """Apply the patches of a scope in this process, now and as modules are imported. Idempotent;
    never raises.

    The entry point of group ``vllm_ascend.scopes``, which ascend-platform calls.
    """
    register()
    _Process.scopes.add(scope)
    _synchronize()


class _Process:
    """The state of this process."""

    joined = False
    patches: tuple[extension.Override, ...] = ()
    scopes: set[str] = set()  # noqa: RUF012
    switched_off: set[str] = set()  # noqa: RUF012
    applied: dict[
        str, tuple[extension.Override, Callable[[], None]]
    ] = {}  # The patch and the function that undoes it, by name.  # noqa: RUF012
    logged: set[str] = set()  # noqa: RUF012
    # Names in DISABLE, before those of the configuration are added.
    from_environment: str | None = None


def _setup(patches: Iterable[extension.Override]) -> None:
    _Process.patches = tuple(patches)
    _Process.from_environment = os.environ.get(DISABLE)
    _Process.switched_off = environment_disabled()
    known = {each.name for each in _Process.patches}
    for name in sorted(_Process.switched_off - known):
        extension.logger.warning(
            "unknown patch %r in %s; fix: %s", name, DISABLE, _hint(name, known)
        )


@dataclass(frozen=True)
class Options:
    """Options of ``ascend.patches``; see docs/configuration.md."""

    disable: list[str] = extension.option([], "names of patches to leave out")

    def __post_init__(self) -> None:
        known = {each.name for each in _Process.patches}
        for name in self.disable:
            if name not in known:
                raise extension.RefusedError(
                    f"additional_config ascend.patches.disable: unknown patch {name!r}; fix:"
                    f" {_hint(name, known)}"
                )


def _configured(options: Mapping[str, object]) -> None:
    """Take ``ascend.patches.disable``, and pass it to child processes through the environment."""
    disabled = cast(list[str], options["disable"])
    before = _Process.from_environment
    if disabled:
        os.environ[DISABLE] = ",".join(filter(None, [before, *disabled]))
    elif before is None:
        os.environ.pop(DISABLE, None)
    else:
        os.environ[DISABLE] = before
    _Process.switched_off = environment_disabled()
    _synchronize()


def _hint(name: str, known: Collection[str]) -> str:
    near = extension.did_you_mean(name, known)
    return f"use {near!r}" if near else f"use one of {', '.join(sorted(known)) or 'none'}"


def _synchronize() -> None:
    """Apply and undo patches until exactly the enabled patches of this process's scopes are applied."""
    for name in [name for name in _Process.applied if name in _Process.switched_off]:
        _Process.applied.pop(name)[1]()
    for each in _Process.patches:
        if (
            each.scope in _Process.scopes
            and each.name not in _Process.switched_off
            and each.name not in _Process.applied
        ):
            when_imported(each.module, functools.partial(_apply, each))


def _apply(patch: extension.Override) -> None:
    """Apply one patch to its imported module, or log in one line why it is disabled."""
    if patch.name in _Process.applied or patch.name in _Process.switched_off:
        return
    try:
        module = sys.modules[patch.module]
        reason = obstacle(patch, extension.version("vllm"))
        others = [other.name for other, _ in _Process.applied.values() if overlap(other, patch)]
        if not reason and others:
            reason = (
                f"target {patch.target} is patched by {others[0]} already; disable one of the two:"
                f" {DISABLE}={others[0]}"
            )
        if not reason:
            make = pkgutil.resolve_name(f"{patch.package}.{patch.by}")
            _Process.applied[patch.name] = (patch, replace(module, patch.qualname, make))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if patch.name in _Process.applied:
        extension.logger.info(
            "patch %s applied to %s (%s): %s", patch.name, patch.target, patch.scope, patch.why
        )
    elif patch.name not in _Process.logged:
        _Process.logged.add(patch.name)
        # A patch outside of its version range is no longer needed.
        say = (
            extension.logger.warning
            if in_range(patch, extension.version("vllm"))
            else extension.logger.debug
        )
        say("patch %s disabled: %s", patch.name, reason)


def replace(module: ModuleType, qualname: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a name by ``make(original)``; returns a function that restores the original."""
    *path, name = qualname.split(".")
    owner = functools.reduce(getattr, path, module)
    raw = vars(owner)[name]
    method = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    new = make(raw.__func__ if method else raw)
    if (
        callable(new)
        and not isinstance(new, type)
        and callable(original := raw.__func__ if method else raw)
    ):
        functools.update_wrapper(new, original)
    setattr(owner, name, method(new) if method else new)
    return lambda: setattr(owner, name, raw)


# Waiting for a module

_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` after the module has been executed: now if it has been, and never if nothing
    imports it."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        act()
        return
    _waiting.setdefault(name, []).append(act)
    if module is not None and spec is not None:
        spec.__class__ = _Watched
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Watched(ModuleSpec):
    """The spec of an awaited module. Python sets `_initializing` to False when the module has been
    executed.

    Wrapping the loader in a finder would be too late for a module whose import is in progress, such
    as the module of the engine core: the spawned process unpickles ``EngineCoreProc.run_engine_core`` and so
    imports ``vllm.v1.engine.core``, which imports ``vllm.config``, which asks for the platform.
    (CPython 3.11 to 3.13, ``importlib/_bootstrap.py``, ``_load_unlocked``; the attribute is also
    what tells its C code of circular imports.)
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        ended = self._initializing and not value
        vars(self)["_initializing"] = value
        if ended and self.name in sys.modules:  # A failed import removes it, and may be repeated.
            for act in _waiting.pop(self.name, ()):
                act()


class _Finder:
    """A finder that marks the specs of awaited modules; the other finders find them."""

    _asking: set[str] = set()  # noqa: RUF012

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting or name in self._asking:
            return None
        self._asking.add(name)
        try:
            for finder in sys.meta_path:
                if (
                    finder is not self
                    and (spec := finder.find_spec(name, path, target)) is not None
                ):
                    spec.__class__ = _Watched
                    return spec
            return None
        finally:
            self._asking.discard(name)


_finder = _Finder()
