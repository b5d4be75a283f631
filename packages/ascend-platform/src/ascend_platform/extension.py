"""The one module that sibling wheels may import: to join, to offer an implementation, to read versions and configuration.

A sibling's ``register()`` calls :func:`join`; its set-up function calls :func:`offer`. Everything here is cheap and
imports neither torch nor vLLM, because vLLM calls ``register()`` in every process, in no particular order and perhaps
twice (``vllm/plugins/__init__.py``).

The names in ``__all__`` are the interface, of version :data:`API_VERSION`; the others are the platform's own.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ascend_platform import chips
from ascend_platform.attention.base import (
    AttentionBackendBase,
    AttentionFeature,
    AttentionImplBase,
    graph_task,
    host_lengths,
    is_captured,
)
from ascend_platform.fingerprint import drift, fingerprint, module_source, tree_version

__all__ = [
    "API_VERSION",
    "AttentionBackendBase",
    "AttentionFeature",
    "AttentionImplBase",
    "Chip",
    "RefusedError",
    "allowed",
    "cache_parts",
    "chip",
    "config",
    "drift",
    "fingerprint",
    "graph_task",
    "host_lengths",
    "is_captured",
    "join",
    "logger",
    "module_source",
    "offer",
    "offered",
    "overrides",
    "state",
    "tree_version",
    "unmet",
    "version",
]

API_VERSION = "1.4"
"""Of this interface, apart from the wheel's version: the second number counts additions, the first all other changes."""

# vLLM's log handler hangs on the logger called "vllm" (vllm/logger.py); a logger below it shows its lines.
logger = logging.getLogger("vllm.ascend")

COMPONENTS = {
    "ascend-platform": "ascend",
    "ascend-attention": "ascend_attention",
    "ascend-communicator": "ascend_communicator",
    "ascend-kv-connector": "ascend_kv_connector",
    "ascend-model-loader": "ascend_model_loader",
    "ascend-patches": "ascend_patches",
}
"""Distribution name to entry-point name, in the order of the summary line. VLLM_PLUGINS filters by the latter."""

VARIABLES = {
    "VLLM_VERSION": "the version of vLLM that requirements and patches are compared with, in place of the installed one",
    "VLLM_ASCEND_DISABLE_PATCHES": "names of patches to leave out, with commas between",
    "VLLM_ASCEND_ACCEPT_OVERRIDES": "names of overrides to apply to a vLLM whose source differs, with commas between",
    "VLLM_ASCEND_WEIGHTS_SECRET": "the secret of engines that take weights from each other, where no file is named for it",
    "VLLM_ASCEND_KV_SECRET": "the secret of instances that pass KV cache to each other, where no file is named for it",
}
"""Environment variables of all components, which the platform makes known to vLLM so that it does not warn of them."""


_RENAMED = {"DenseBackend": "AttentionBackendBase", "DenseImpl": "AttentionImplBase"}
"""Deprecated names of this interface, and what they are called now."""


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is deprecated; use {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


class RefusedError(ValueError):
    """What the user asked for is not served; vLLM's command ends with the message, which is one line, and no traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Chip:
    """The NPU of this process. ``memory`` is in bytes."""

    name: str
    memory: int
    cube_cores: int
    vector_cores: int

    @property
    def family(self) -> chips.ChipFamily:
        """Capabilities of the chip's family; see ``ascend_platform/chips.py``."""
        return chips.family_of(self.name)


_states: dict[str, str] = {}
_offers: dict[str, str] = {}
_options: dict[str, dict[str, object]] = {}
_given: dict[str, dict[str, object]] = {}
_configured: dict[str, Callable[[Mapping[str, object]], None]] = {}


def join(
    distribution: str,
    entry_point: str,
    setup: Callable[[], None] | None = None,
    *,
    note: str = "",
    options: Mapping[str, object] | None = None,
    configured: Callable[[Mapping[str, object]], None] | None = None,
    api: str = "1.0",
    **later: object,
) -> None:
    """Bring a component in, or let it stand aside when what it requires is not what is installed.

    Never raises; a second call does nothing.

    Args:
        distribution: the wheel's name, whose ``Requires-Dist`` metadata is compared with what is installed.
        entry_point: the name of its entry point, which is what VLLM_PLUGINS filters by.
        setup: called once if the requirements hold; it must not import torch or vLLM.
        note: shown in the summary line.
        options: the keys, with defaults, that ``--additional-config '{"ascend": {<name>: {...}}}'`` may set, where
            ``<name>`` is the entry point's name without ``ascend_``.
        configured: called with the options, given ones over defaults, whenever vLLM's configuration is taken; it raises
            RefusedError to refuse them.
        api: the version of this interface that the component was written against.
        later: what later versions of this interface may take; a component that gives any stands aside here.
    """
    if distribution in _states:
        return
    try:
        reason = clash() or unmet(distribution) or _unfit(distribution, api, later)
        if not reason:
            _options[_namespace(entry_point)] = dict(options or {})
            if setup:
                setup()
            if configured:
                _configured[_namespace(entry_point)] = configured
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _states[distribution] = f"standing aside: {reason}"
        logger.warning("%s %s is standing aside: %s", distribution, version(distribution), reason)
    else:
        _states[distribution] = f"active ({note})" if note else "active"


def _unfit(distribution: str, api: str, later: Iterable[str]) -> str:
    """Why this interface is not the one that a component was written against; "" if it is, or has only grown since."""
    (has, grown), (wants, least) = (map(int, each.split(".")) for each in (API_VERSION, api))
    written = f"it was written for version {api} of ascend_platform.extension and found {API_VERSION}; run: pip install --upgrade"
    if wants < has:
        return f"{written} {distribution}"
    if (wants, least) > (has, grown):
        return f"{written} ascend-platform"
    takes_no = f"ascend_platform.extension.join takes no {', '.join(later)}"
    return f"{takes_no}; run: pip install --upgrade ascend-platform" if later else ""


def unmet(distribution: str) -> str:
    """The first requirement of an installed wheel that does not hold, as one sentence with what to do; "" if all hold.

    The environment variable VLLM_VERSION replaces vLLM's version, for people who run an edited vLLM.
    """
    try:
        declared = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return ""  # a source tree that is not installed declares nothing
    for requirement in map(Requirement, declared):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        found = version(requirement.name)
        if not found:
            return f"it needs {wanted}, which is not installed; run: {install(requirement.name, wanted)}"
        if not requirement.specifier.contains(found, prereleases=True):
            return f"it needs {wanted} and found {found}; run: {install(requirement.name, wanted)}"
    return ""


def install(name: str, wanted: str) -> str:
    """The command for a distribution. vLLM's is of its source: its wheel is CUDA's, and brings the packages of CUDA."""
    of_source = "VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 pip install --no-binary vllm"
    return f"{of_source if name == 'vllm' else 'pip install'} '{wanted}'"


@functools.cache
def clash() -> str:
    """Another wheel that has the platform's name, as one sentence with what to do; "" if there is none.

    vLLM keeps one plugin of a name, whichever it finds last (``vllm/plugins/__init__.py``). vllm-ascend has that name, and
    others of ours.
    """
    taken: dict[str, list[str]] = {}
    for group in ("vllm.platform_plugins", "vllm.general_plugins"):
        for point in importlib.metadata.entry_points(group=group):
            owner = canonicalize_name(point.dist.name) if point.dist else ""
            if point.name in COMPONENTS.values() and owner and owner not in COMPONENTS:
                taken.setdefault(owner, []).append(point.name)
    for owner, names in taken.items():
        if COMPONENTS["ascend-platform"] not in names:
            continue
        return (
            f"{owner} {version(owner)} is installed too and has plugins of the same name ({', '.join(names)}), of which vLLM "
            f"keeps one; run: pip uninstall -y {owner}"
        )
    return ""


def version(distribution: str) -> str:
    """The installed version of a distribution, or "" when it is not installed."""
    if distribution == "vllm" and (override := os.environ.get("VLLM_VERSION")):
        return override
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def offer(slot: str, implementation: str) -> None:
    """Offer the class of this qualified name for a slot of the platform, for example ``attention.dense``.

    Raises:
        ValueError: another implementation has been offered for the slot.
    """
    if _offers.setdefault(slot, implementation) != implementation:
        raise ValueError(f"slot {slot} is taken by {_offers[slot]}; {implementation} cannot have it too")


def offered(slot: str) -> str | None:
    """The qualified name offered for a slot, or None."""
    return _offers.get(slot)


def state(distribution: str) -> str:
    """What the summary line says of a component: active, off, not installed or standing aside, and why."""
    if distribution in _states:
        return _states[distribution]
    if not version(distribution):
        return "not installed"
    name = COMPONENTS[distribution]
    if not allowed(name):
        if name in map(str.strip, os.environ["VLLM_PLUGINS"].split(",")):
            return "off (VLLM_PLUGINS has a space next to its name, which vLLM takes as part of it)"
        return "off (filtered out by VLLM_PLUGINS)"
    return "not loaded"


def allowed(entry_point: str) -> bool:
    """Whether VLLM_PLUGINS lets an entry point of this name in, as vLLM reads it (``vllm/plugins/__init__.py``)."""
    names = os.environ.get("VLLM_PLUGINS")
    return names is None or entry_point in names.split(",")


def scopes_here() -> tuple[str, ...]:
    """The scopes of patches that this process is known to be of before vLLM has made anything in it.

    The name that vLLM gives a process is set by ``multiprocessing.spawn.prepare`` before the child unpickles, hence imports,
    anything of vLLM: ``EngineCore`` or ``EngineCore_DP<n>`` (``vllm/v1/engine/utils.py``, ``CoreEngineProcManager``) and
    ``VllmWorker-<n>`` (``vllm/v1/executor/multiproc_executor.py``). All others are the main process or stand for it. Engine
    and worker can also run in the main process, in the engine's, or in an actor of Ray; for those the platform enters their
    scopes from the hooks that vLLM calls there.
    """
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        return ("engine",)
    if name.startswith("VllmWorker-"):
        return ("worker",)
    return ("platform", "engine") if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else ("platform",)


def enter(scope: str) -> None:
    """Tell the components that patch vLLM that this process is of a scope: ``platform``, ``engine`` or ``worker``.

    They are the entry points of group ``vllm_ascend.scopes``, functions that take the scope. They are asked by entry point
    because general plugins run too late: in the engine core only after ``EngineCoreProc.__init__`` has begun. Never raises.
    """
    for point in importlib.metadata.entry_points(group="vllm_ascend.scopes"):
        if allowed(point.name):
            try:
                point.load()(scope)
            except Exception as error:
                logger.warning("%s cannot enter scope %s: %s: %s", point.value, scope, type(error).__name__, error)


def summary(attention: str) -> str:
    """One line naming every component, its version and state, which attention serves, and the versions below."""
    parts = [" ".join(filter(None, (name.removeprefix("ascend-"), version(name), state(name)))) for name in COMPONENTS]
    below = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "torch-npu"))
    return " | ".join(["vllm-ascend-all", *parts, f"attention: {attention}", below])


def configure(additional_config: object) -> None:
    """Take and check the ``ascend`` part of vLLM's ``--additional-config``.

    Raises:
        RefusedError: an unknown name or key, with the nearest known one.
    """
    given = additional_config.get("ascend", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise RefusedError(f'additional_config "ascend" must be an object, not {given!r}')
    for namespace, values in given.items():
        _check_known("ascend", namespace, _options)
        if not isinstance(values, Mapping):
            raise RefusedError(f'additional_config "ascend.{namespace}" must be an object, not {values!r}')
        for key in values:
            _check_known(f"ascend.{namespace}", key, _options[namespace])
    _given.clear()
    _given.update({namespace: dict(values) for namespace, values in given.items()})
    for namespace, take in _configured.items():
        take(config(namespace))


def config(namespace: str) -> dict[str, object]:
    """The options of a component, given ones over defaults. ``namespace`` is its name without ``ascend-``."""
    return _options.get(namespace, {}) | _given.get(namespace, {})


def overrides(tree: Path | None = None) -> list[dict[str, str]]:
    """The names of vLLM that ascend-platform overrides, compared with a vLLM.

    Args:
        tree: a checkout or a site-packages that contains vLLM; the installed one without.

    Returns:
        For each its ``name``, ``target``, ``action``, ``vllm`` (the versions whose source is known), ``why``, ``remove_when`` and
        ``problem``, "" where vLLM's source is as supported.
    """
    from ascend_platform import vllm_overrides

    return [each.row(tree) for each in vllm_overrides.OVERRIDES]


def chip() -> Chip:
    """The NPU that this process uses. Opens the device's context, so call it in a worker only."""
    import torch

    properties = torch.npu.get_device_properties(torch.npu.current_device())
    return Chip(properties.name, properties.total_memory, properties.cube_core_num, properties.vector_core_num)


def cache_parts(kv_cache: Any) -> dict[str, Any]:
    """The tensors of one layer's KV cache, as the platform has taken it apart, by part: ``key`` and ``value``.

    Each is contiguous, ``[blocks, block_size, kv_heads, head_size]`` in the cache's dtype: block ``b`` is the run of
    ``stride(0)`` elements at ``data_ptr() + b * stride(0) * element_size()``. ``kv_cache`` is what an attention's ``forward`` and
    a connector's ``register_kv_caches`` get for a layer.

    Raises:
        TypeError: something else.
    """
    if not hasattr(kv_cache, "_asdict"):
        found = type(kv_cache).__name__
        raise TypeError(f"a layer's KV cache is expected, as ascend_platform.attention.kv_cache.KVCachePair, not {found}")
    return kv_cache._asdict()


def _namespace(entry_point: str) -> str:
    return entry_point.removeprefix("ascend_")


def _check_known(where: str, key: str, known: Mapping[str, object]) -> None:
    if key not in known:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known)) or 'none'}"
        raise RefusedError(f"additional_config {where!r} has no key {key!r}{hint}")
