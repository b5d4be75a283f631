# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Guards that compare vLLM's source with the tables of overrides.

:func:`check` compares whole tables where an engine is configured; :func:`install`, :func:`override`,
:func:`add` and :func:`require` compare a row again where it is applied, so that nothing is replaced
in a vLLM that is not supported. The tables are also the source of patches-ledger.md and of
``vllm-ascend patches``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ascend_platform import fingerprint
from ascend_platform.errors import RefusedError, did_you_mean
from ascend_platform.logger import logger
from ascend_platform.overrides import table
from ascend_platform.overrides.table import Override
from ascend_platform.plugins import requirements

ACCEPT = "VLLM_ASCEND_ACCEPT_OVERRIDES"


def check(*tables: str) -> None:
    """Compare all targets of these tables with the source that this version supports.

    Raises:
        RefusedError: a target is missing or has changed, in one line.
    """
    check_rows(table.rows(*tables))


def check_rows(rows: Iterable[Override]) -> None:
    """Compare the targets of these rows with the source that this version supports.

    Raises:
        RefusedError: a target is missing or has changed, in one line.
    """
    _warn_of_unknown_names(frozenset(_accepted()))
    rows = [each for each in rows if each.is_needed]
    different = [each for each in rows if _problem(each.target)]
    refused = [each for each in different if not _accept(each)]
    fingerprint.parsed.cache_clear()
    if refused:
        more = (
            f" (and {len(refused) - 1} more, see vllm-ascend patches check)" if refused[1:] else ""
        )
        raise _error(refused[0], f"{_problem(refused[0].target)}{more}")


def install(name: str, *modules: str) -> None:
    """Apply the rows of a table whose replacement is in these modules, below the table's package, or
    all that name one; a second call does nothing.

    Raises:
        RefusedError: as :func:`override`.
    """
    rows = table.of_modules(name, *modules)
    chosen = [each for each in rows if each.by and each.action != "contained"]
    # Our modules import vLLM's own objects, so that they come before any of these is replaced.
    found = [(each, pkgutil.resolve_name(f"{each.package}.{each.by}")) for each in chosen]
    for each, replacement in found:
        if each.action == "entries added":
            add(each.target, replacement)
        elif each.action == "replaced":
            override(each.target, replacement)
    _register({row.target: by for row, by in found if row.action == "kernel registered"})


def _register(kernels: Mapping[str, Any]) -> None:
    """Let vLLM launch these functions instead of its kernels."""
    if not kernels:
        return
    from vllm.triton_utils import dispatcher

    new = {}
    for target, kernel in kernels.items():
        require(target)
        name = target.replace(":", ".")
        _, registered = dispatcher._registry.get(name, (None, None))
        if registered is not None and registered is not kernel:
            report_foreign(target, registered)
        if registered is not kernel:
            new[name] = kernel
    if not new:
        return
    originals = {id(getattr(*dispatcher._resolve_kernel(name))) for name in new}
    # vLLM looks at each object of every module, which takes half a second, and makes names of other
    # packages that are resolved at that warn. Its own modules wrap kernels, others may import them.
    holders = {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") or not originals.isdisjoint(_identities(module))
    }
    with replaced("vllm.triton_utils.dispatcher:sys", SimpleNamespace(modules=holders)):
        dispatcher.register_kernels(new)


def override(target: str, replacement: Any) -> None:
    """Replace a name of vLLM in this process; a second call for a target does nothing.

    A module that has imported the original with ``from … import`` would keep it. vLLM's modules
    that have done so must be in the entry's ``replaced_in`` or ``kept_in``.

    Raises:
        RefusedError: the target is missing or has changed, or a module that the entry does not name
            has imported it.
    """
    each = _entry(target)
    if target in _applied:
        return
    original = _resolve(each)
    report_foreign(target, original)
    if "." in each.qualname:
        owner = functools.reduce(
            getattr, each.qualname.split(".")[:-1], importlib.import_module(each.module)
        )
        setattr(owner, each.qualname.rpartition(".")[2], replacement)
    else:
        named = each.replaced_in or (each.module,)
        if not isinstance(original, ModuleType):
            _check_importers(each, original, {each.module, *named})
        for name in named:
            # One that is imported later imports the replacement.
            if name in sys.modules or each.module not in named:
                setattr(importlib.import_module(name), each.qualname, replacement)
    _applied.add(target)


@contextlib.contextmanager
def replaced(target: str, replacement: Any) -> Iterator[None]:
    """Replace a name of a module of vLLM's while the context lasts.

    Raises:
        RefusedError: the target is missing or has changed.
    """
    each = _entry(target)
    original = _resolve(each)
    module = importlib.import_module(each.module)
    setattr(module, each.qualname, replacement)
    try:
        yield
    finally:
        setattr(module, each.qualname, original)


def add(target: str, entries: Mapping[Any, Any] | Iterable[Any]) -> None:
    """Add entries to a dict, or attributes to a class, where it does not have the key, or members
    to a set of vLLM.

    Raises:
        RefusedError: the target is missing, or its source or that of its user has changed.
    """
    found = _resolve(_entry(target))
    if isinstance(entries, Mapping):
        for key, value in entries.items():
            if not isinstance(found, type):
                found.setdefault(key, value)
            elif not hasattr(found, key):
                setattr(found, key, value)
    else:
        found.update(entries)


@contextlib.contextmanager
def without(target: str, members: Iterable[Any]) -> Iterator[None]:
    """Take members out of a set of vLLM's while the context lasts.

    Raises:
        RefusedError: the target is missing, or its source or that of its user has changed.
    """
    found, members = _resolve(_entry(target)), set(members)
    found.difference_update(members)
    try:
        yield
    finally:
        found.update(members)


def require(target: str) -> None:
    """Compare a target that is used, or replaced through a registry of vLLM, with the supported
    source.

    Raises:
        RefusedError: the target is missing or has changed.
    """
    if _problem(target) and not _accept(_entry(target)):
        raise _error(_entry(target), _problem(target))
    fingerprint.parsed.cache_clear()


_applied: set[str] = set()


def _entry(target: str) -> Override:
    return next(each for each in table.rows() if each.target == target)


def _accepted() -> set[str]:
    return set(filter(None, map(str.strip, os.environ.get(ACCEPT, "").split(","))))


@functools.cache
def _warn_of_unknown_names(accepted: frozenset[str]) -> None:
    names = {each.name for each in table.rows()}
    for name in sorted(accepted - names):
        near = did_you_mean(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        logger.warning("%s names %r, which is no override%s", ACCEPT, name, hint)


@functools.cache
def _problem(target: str) -> str:
    return _entry(target).problem()


def _accept(each: Override) -> bool:
    """Whether the user accepts the difference; a missing target cannot be accepted."""
    problem = _problem(each.target)
    if each.name not in _accepted() or "is missing" in problem:
        return False
    logger.warning("override %s applied despite a mismatch (%s): %s", each.name, ACCEPT, problem)
    return True


def _error(each: Override, problem: str) -> RefusedError:
    accept = ""
    if "is missing" not in problem:
        names = ",".join(sorted({*_accepted(), each.name}))
        accept = f", or, if this vLLM is edited and the override fits it: export {ACCEPT}={names}"
    return RefusedError(
        f"vLLM {requirements.version('vllm')} is not supported by {each.distribution}"
        f" {requirements.version(each.distribution)}: override {each.name}: {problem};"
        f" fix: {requirements.upgrade_command(each.distribution)}, or install an unedited release of"
        f" {_supported()}{accept}"
    )


def _supported() -> str:
    return str(requirements.required_by_platform("vllm"))


def _resolve(each: Override) -> Any:
    require(each.target)
    try:
        return functools.reduce(
            getattr, each.qualname.split("."), importlib.import_module(each.module)
        )
    except (ImportError, AttributeError) as error:
        raise _error(each, f"target {each.target} is missing: {error}") from error


def _identities(module: Any) -> Iterator[int]:
    """Of the objects that a module has; they are not compared, as arrays have no truth value."""
    return map(id, list(getattr(module, "__dict__", {}).values()))


def _check_importers(each: Override, original: Any, known: set[str]) -> None:
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("vllm.")
            and id(original) in _identities(module)
            and name not in known
            and not any(f"{name}.".startswith(f"{kept}.") for kept in each.kept_in)
            and each.name not in _accepted()
        ):
            raise _error(each, f"{name} has imported {each.target} too, and would keep vLLM's own")


def report_foreign(target: str, original: Any) -> None:
    """Log which other plugin has replaced vLLM's own object, if one has."""
    name = (
        getattr(original, "__globals__", {}).get("__name__")
        or getattr(original, "__module__", None)
        or ""
    )
    if isinstance(name, str) and name.partition(".")[0] not in (
        *sys.stdlib_module_names,
        "vllm",
        "torch",
        "",
    ):
        logger.warning(
            "override %s replaces the object that %s has installed for %s",
            _entry(target).name,
            name,
            target,
        )
