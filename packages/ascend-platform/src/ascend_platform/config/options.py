# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The ``ascend`` part of vLLM's ``--additional-config``: known keys, values given, and the
components that check them.

Values are checked where they are read, so that no hook of vLLM sees one of another type, whichever
comes first.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ascend_platform.errors import Problem, RefusedError


class Choice(NamedTuple):
    """An option of the platform: its default, and the values that are supported."""

    default: object
    supported: tuple[object, ...] = (True, False)

    def takes(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.supported)


PLATFORM = {
    "model_runner": Choice("auto", ("auto", "v1", "v2")),
    "weight_nz": Choice(None, (True, False, None)),
    "fp8": Choice("dequantize", ("dequantize", "W8A8_DYNAMIC")),
    "matmul_all_reduce": Choice(False),
    "shared_experts_stream": Choice(False),
    "numa_bind": Choice(True),
    "mla_prolog": Choice(False),
}
"""All options of ``ascend.platform``; see docs/configuration.md."""

_defaults: dict[str, dict[str, object]] = {
    "platform": {name: each.default for name, each in PLATFORM.items()}
}
_given: dict[str, dict[str, object]] = {}
_listeners: dict[str, Callable[[Mapping[str, object]], None]] = {}


class UnknownKeyError(RefusedError):
    """An unknown name or key of ``--additional-config``; ``problem`` has the nearest known one, or
    all known, as its fix."""

    def __init__(self, where: str, key: str, known: Mapping[str, object]) -> None:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
        )
        self.problem = Problem(f"additional_config {where!r} has no key {key!r}", hint)
        super().__init__(f"{self.problem.found}; {hint}")


def namespace(entry_point: str) -> str:
    """The name under ``ascend`` of a component's options: its entry point's without ``ascend_``, or
    ``platform``."""
    return "platform" if entry_point == "ascend" else entry_point.removeprefix("ascend_")


def register(namespace: str, defaults: Mapping[str, object]) -> None:
    """Add a component's keys, with their defaults."""
    _defaults[namespace] = _defaults.get(namespace, {}) | dict(defaults)


def listen(namespace: str, configured: Callable[[Mapping[str, object]], None]) -> None:
    """Call a function with a component's options whenever a configuration is taken."""
    _listeners[namespace] = configured


def check(additional_config: object) -> dict[str, dict[str, object]]:
    """The ``ascend`` part of vLLM's ``--additional-config``: by component, what is given.

    Raises:
        RefusedError: an unknown name or key, with the nearest known one, or a value that the
        platform does not support.
    """
    names = _ascend(additional_config)
    for name in names:
        if name not in _defaults:
            raise UnknownKeyError("ascend", name, _defaults)
    return {name: _values(names, name) for name in names}


def configure(additional_config: object) -> None:
    """Take a configuration's ``ascend`` part, and hand each component its options.

    Raises:
        RefusedError: as :func:`check`, or a value that a component refuses.
    """
    found = check(additional_config)
    _given.clear()
    _given.update(found)
    for name, configured in _listeners.items():
        configured(config(name))


def given(vllm_config: object, namespace: str) -> dict[str, object]:
    """A component's options in an engine's configuration, without defaults.

    Raises:
        RefusedError: an unknown key, or a value that the platform does not support.
    """
    return _values(_ascend(getattr(vllm_config, "additional_config", None)), namespace)


def of_platform(vllm_config: object, name: str) -> Any:
    """The value of an option of the platform in an engine's configuration, given or default.

    Raises:
        RefusedError: as :func:`given`.
    """
    return given(vllm_config, "platform").get(name, PLATFORM[name].default)


def config(namespace: str) -> dict[str, object]:
    """The options of a component, given ones over defaults. ``namespace`` is its name without
    ``ascend-``.

    They are those of the engine whose configuration is vLLM's current one, otherwise those of the
    last engine of the process.
    """
    vllm = sys.modules.get("vllm.config")  # this module does not import vLLM
    current = vllm and vllm.get_current_vllm_config_or_none()
    return _defaults.get(namespace, {}) | (
        given(current, namespace) if current else _given.get(namespace, {})
    )


def _ascend(additional_config: object) -> Mapping[str, object]:
    """The ``ascend`` part, an object of objects."""
    names = additional_config.get("ascend", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(names, Mapping):
        raise RefusedError(
            f'additional_config "ascend" must be an object, not {names!r}; fix: {{"ascend":'
            ' {"NAME": {…}}}'
        )
    return names


def _values(names: Mapping[str, object], namespace: str) -> dict[str, object]:
    """The options given under a name, with keys of a registered component and values that the
    platform supports."""
    values = names.get(namespace, {})
    if not isinstance(values, Mapping):
        fix = f'{{"ascend": {{"{namespace}": {{…}}}}}}'
        raise RefusedError(
            f'additional_config "ascend.{namespace}" must be an object, not {values!r}; fix: {fix}'
        )
    known = _defaults.get(namespace, values)
    for key, value in values.items():
        if key not in known:
            raise UnknownKeyError(f"ascend.{namespace}", key, known)
        if namespace == "platform" and not PLATFORM[key].takes(value):
            supported = ", ".join(
                each if isinstance(each, str) else json.dumps(each)
                for each in PLATFORM[key].supported
            )
            raise RefusedError(
                f'additional_config "ascend.platform.{key}" is {value!r}; supported: {supported}'
            )
    return dict(values)
