# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Component registration: each wheel's state in this process, and the summary line."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ascend_platform import options
from ascend_platform.errors import Problem
from ascend_platform.logger import logger
from ascend_platform.plugins import COMPONENTS, requirements
from ascend_platform.plugins.plugin_filter import PluginFilter

API_VERSION = "1.9"
"""Version of ``ascend_platform.extension``: additions raise the second number, all other changes
the first."""


class State(enum.StrEnum):
    """State of a component or of another plugin of vLLM."""

    ACTIVE = "active"
    OFF = "off"
    """Filtered out by VLLM_PLUGINS."""
    DISABLED = "disabled"
    """Its requirements are not met, or its set-up failed."""
    NOT_LOADED = "not loaded"
    NOT_INSTALLED = "not installed"
    SHADOWED = "shadowed"
    """Another wheel has a plugin of the same name, and vLLM keeps that one."""
    BROKEN = "broken"
    """Its module is missing or cannot be imported."""


@dataclass(frozen=True)
class Status:
    """A state, details of it, and the command that makes the component active ("" if none is
    known)."""

    state: State
    detail: str = ""
    fix: str = ""

    def __str__(self) -> str:
        if self.state == State.DISABLED:
            return f"{self.state}: {Problem(self.detail, self.fix)}"
        return f"{self.state} ({self.detail})" if self.detail else self.state


_statuses: dict[str, Status] = {}


def join(
    distribution: str,
    entry_point: str,
    setup: Callable[[], None] | None = None,
    *,
    note: str = "",
    options: type | Mapping[str, object] | None = None,
    configured: Callable[[Mapping[str, object]], None] | None = None,
    api: str = "1.0",
    **later: object,
) -> None:
    """Register a component, which stays disabled if its requirements are not met or its set-up
    fails.

    Never raises; a second call does nothing.

    Args:
        distribution: the wheel's name, whose ``Requires-Dist`` metadata is compared with what is
            installed.
        entry_point: the name of its entry point, by which VLLM_PLUGINS filters.
        setup: called once if the requirements are met; it must not import torch or vLLM.
        note: shown in the summary line.
        options: what ``--additional-config '{"ascend": {<name>: {...}}}'`` may set, where
            ``<name>`` is the entry point's name without ``ascend_``: a frozen dataclass whose
            fields are made by ``option``, or keys with defaults, whose values are not checked.
        configured: called with the options, given ones over defaults, whenever vLLM's configuration
            is taken; it raises RefusedError to refuse them.
        api: the version of this interface that the component was written for.
        later: arguments of later versions of this interface; a component that gives any is
            disabled.
    """
    if distribution not in _statuses:
        _statuses[distribution] = _join(
            distribution, entry_point, setup, note, options, configured, api, later
        )
        if (found := _statuses[distribution]).state == State.DISABLED:
            version = requirements.version(distribution)
            logger.warning("%s %s %s", distribution, version, found)


def _join(
    distribution: str,
    entry_point: str,
    setup: Callable[[], None] | None,
    note: str,
    table: type | Mapping[str, object] | None,
    configured: Callable[[Mapping[str, object]], None] | None,
    api: str,
    later: Iterable[str],
) -> Status:
    namespace = options.namespace(entry_point)
    try:
        problem = requirements.conflict() or requirements.unmet(distribution)
        problem = problem or _incompatible(distribution, api, later)
        if not problem:
            options.register(namespace, table)
            if setup:
                setup()
            if configured:
                options.listen(namespace, configured)
    except Exception as error:
        problem = Problem(f"{type(error).__name__}: {error}")
    return Status(State.DISABLED, *problem) if problem else Status(State.ACTIVE, note)


def _incompatible(distribution: str, api: str, later: Iterable[str]) -> Problem | None:
    """Why a component written for version ``api`` of the interface cannot use this one, if it
    cannot."""
    own, wanted = ([*map(int, each.split("."))] for each in (API_VERSION, api))
    found = f"written for version {api} of ascend_platform.extension, found {API_VERSION}"
    if wanted[0] < own[0]:
        is_ours = distribution in COMPONENTS
        upgrade = f"pip install --upgrade {distribution}"
        return Problem(found, requirements.upgrade_command() if is_ours else upgrade)
    if wanted > own:
        return Problem(found, requirements.upgrade_command())
    if later:
        found = f"ascend_platform.extension.join takes no {', '.join(later)}"
        return Problem(found, requirements.upgrade_command())
    return None


def status(distribution: str) -> Status:
    """The status of a component in this process."""
    if distribution in _statuses:
        return _statuses[distribution]
    if not requirements.version(distribution):
        return Status(State.NOT_INSTALLED, fix=f"pip install {distribution}")
    filtered, name = PluginFilter.current(), COMPONENTS[distribution]
    if filtered.allows(name):
        vllm_plugins = sys.modules.get("vllm.plugins")  # this module does not import vLLM
        if vllm_plugins and not vllm_plugins.plugins_loaded:
            fix = "call vllm.plugins.load_general_plugins() before"
            return Status(State.NOT_LOADED, "vLLM has not loaded its plugins", fix)
        fix = f"pip install --force-reinstall --no-deps {distribution}"
        return Status(State.NOT_LOADED, fix=fix)
    space = "VLLM_PLUGINS has a space next to its name, which vLLM takes as part of it"
    detail = space if filtered.has_space_beside(name) else "filtered out by VLLM_PLUGINS"
    return Status(State.OFF, detail, filtered.fix_to_allow(name))


def state(distribution: str) -> str:
    """A component's state as in the summary line: active, off, not installed or disabled,
    and why."""
    return str(status(distribution))


def with_state(distribution: str) -> str:
    """A component's name with its state and the command that makes it active, for errors about what
    needs it."""
    found = status(distribution)
    return str(Problem(f"{distribution}, which is {replace(found, fix='')}", found.fix))


def summary(attention: str, runner: str = "", delta_rule: str = "") -> str:
    """One line with every component's version and state, the attention backend, and the versions of
    vLLM, torch and torch-npu.

    ``runner`` is the model runner and what asks for it; ``delta_rule`` is the gated delta rule of a
    model that uses it.
    """
    version = requirements.version
    names = dict.fromkeys((*COMPONENTS, *_statuses))  # The others are of other projects.
    named = [(name.removeprefix("ascend-"), version(name), state(name)) for name in names]
    parts = [" ".join(filter(None, each)) for each in named]
    below = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "torch-npu"))
    chosen = {"attention": attention, "gated delta rule": delta_rule, "model runner": runner}
    choices = [f"{what}: {which}" for what, which in chosen.items() if which]
    return " | ".join(["vllm-ascend-all", *parts, *choices, below])
