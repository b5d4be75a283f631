"""The ``ascend`` part of vLLM's ``--additional-config``: known keys, values given, and the components that check them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping

from ascend_platform.components import Problem, RefusedError

_defaults: dict[str, dict[str, object]] = {}
_given: dict[str, dict[str, object]] = {}
_listeners: dict[str, Callable[[Mapping[str, object]], None]] = {}


class UnknownKeyError(RefusedError):
    """An unknown name or key of ``--additional-config``; ``problem`` has the nearest known one, or all known, as its fix."""

    def __init__(self, where: str, key: str, known: Mapping[str, object]) -> None:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
        self.problem = Problem(f"additional_config {where!r} has no key {key!r}", hint)
        super().__init__(f"{self.problem.found}; {hint}")


def register(namespace: str, defaults: Mapping[str, object]) -> None:
    """Add a component's keys, with their defaults."""
    _defaults[namespace] = _defaults.get(namespace, {}) | dict(defaults)


def listen(namespace: str, configured: Callable[[Mapping[str, object]], None]) -> None:
    """Call a function with a component's options whenever a configuration is taken."""
    _listeners[namespace] = configured


def configure(additional_config: object) -> None:
    """Take and check the ``ascend`` part of vLLM's ``--additional-config``.

    Raises:
        RefusedError: an unknown name or key, with the nearest known one, or a value that a component refuses.
    """
    given = additional_config.get("ascend", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise RefusedError(f'additional_config "ascend" must be an object, not {given!r}')
    for namespace, values in given.items():
        if namespace not in _defaults:
            raise UnknownKeyError("ascend", namespace, _defaults)
        if not isinstance(values, Mapping):
            raise RefusedError(f'additional_config "ascend.{namespace}" must be an object, not {values!r}')
        for key in values:
            if key not in _defaults[namespace]:
                raise UnknownKeyError(f"ascend.{namespace}", key, _defaults[namespace])
    _given.clear()
    _given.update({namespace: dict(values) for namespace, values in given.items()})
    for namespace, configured in _listeners.items():
        configured(config(namespace))


def given(vllm_config: object, namespace: str) -> dict[str, object]:
    """What an engine's configuration gives for a component, without defaults."""
    additional_config = getattr(vllm_config, "additional_config", None)
    every = additional_config.get("ascend", {}) if isinstance(additional_config, Mapping) else {}
    return dict(every.get(namespace, {}))


def config(namespace: str) -> dict[str, object]:
    """The options of a component, given ones over defaults. ``namespace`` is its name without ``ascend-``.

    They are those of the engine whose configuration is vLLM's current one, otherwise those of the last engine of the process.
    """
    vllm = sys.modules.get("vllm.config")  # this module does not import vLLM
    current = vllm and vllm.get_current_vllm_config_or_none()
    return _defaults.get(namespace, {}) | (given(current, namespace) if current else _given.get(namespace, {}))
