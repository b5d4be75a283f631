# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options: a table for each namespace of ``--additional-config '{"ascend": {…}}'``, and the parser
of all tables.

A table is a frozen dataclass whose fields are made by :func:`option`. :func:`of` reads one. An
engine's options are parsed by the first read, whichever hook of vLLM that is in, and kept on its
VllmConfig as :class:`Parsed`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from ascend_platform.errors import Problem, RefusedError, did_you_mean

Table = TypeVar("Table")

NAMES = {
    bool: "true, false",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
}
"""How messages and tables of the documentation call the values of a type."""


def option(default: object, text: str) -> Any:
    """A field of a table: its default, and a description in one line."""
    metadata = {"text": text}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Range:
    """Limits of a number, for ``Annotated``; ``minimum`` is left out of an ``is_open`` range."""

    minimum: float
    maximum: float = float("inf")
    unit: str = ""
    is_open: bool = False

    def holds(self, value: Any) -> bool:
        return self.minimum <= value <= self.maximum and not (
            self.is_open and value == self.minimum
        )

    def __str__(self) -> str:
        if self.maximum < float("inf"):
            limits = f"from {self.minimum} to {self.maximum}"
        else:
            limits = f"{'above' if self.is_open else 'of at least'} {self.minimum}"
        return f"{limits} ({self.unit})" if self.unit else limits


@dataclass(frozen=True)
class Platform:
    """Options of ``ascend.platform``; see docs/configuration.md."""

    model_runner: Literal["auto", "v1", "v2"] = option(
        "auto", "vLLM's model runner; `auto` takes V2 unless it lacks a feature of the engine"
    )
    weight_nz: bool | None = option(
        None, "storage of quantized matrices in FRACTAL_NZ; `null` decides by chip"
    )
    fp8: Literal["auto", "dequantize", "W8A8_DYNAMIC"] = option(
        "auto",
        "what FP8 weights are converted to at load: the model's dtype, or int8; `auto`: nothing where"
        " the chip multiplies FP8",
    )
    shared_experts_stream: bool = option(
        False, "shared experts on a second stream, beside the routed experts"
    )
    local_argmax: bool | None = option(
        None,
        "greedy tokens from each rank's part of the vocabulary, without a gather of all logits;"
        " `null`: with 8 ranks of tensor parallelism or more",
    )
    index_cache: Literal["auto", "int8"] = option(
        "auto", "keys of sparse attention's indexer in the KV cache: the model's dtype, or int8"
    )
    latent_cache: Literal["auto", "int8"] = option(
        "auto", "latents of sparse attention in the KV cache: the model's dtype, or int8"
    )
    numa_bind: bool = option(True, "binding of workers to the NUMA nodes of their NPUs")
    mla_prolog: bool = option(
        False, "npu_mla_prolog_v3 before the attention of latent attention's decodes"
    )


_tables: dict[str, type] = {"platform": Platform}
_listeners: dict[str, Callable[[Mapping[str, object]], None]] = {}


class UnknownKeyError(RefusedError):
    """An unknown key; ``problem`` has the nearest known one, or all known, as its fix."""

    def __init__(self, where: str, key: object, known: Mapping[str, object]) -> None:
        near = did_you_mean(key, known)
        every = f"use one of {', '.join(sorted(known))}" if known else "remove it"
        fix = f"use {near!r}" if near else every
        self.problem = Problem(f"{where} has no key {key!r}", fix)
        super().__init__(str(self.problem))


def hints(table: type) -> dict[str, Any]:
    """The type of each option of a table."""
    return typing.get_type_hints(table, include_extras=True)


def parse(table: type[Table], values: object, where: str) -> Table:
    """A table with values over its defaults.

    Args:
        where: what the user has written them in, as messages name it.

    Raises:
        RefusedError: an unknown key, with the nearest known one, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise RefusedError(f"{where} must be an object, not {values!r}; fix: write {{…}} there")
    types_of = hints(table)
    for key, value in values.items():
        if key not in types_of:
            raise UnknownKeyError(where, key, types_of)
        if not _takes(types_of[key], value):
            found = f"{where}.{key} is {value!r}; supported: {describe(types_of[key])}"
            raise RefusedError(f"{found}; fix: correct or remove it")
    return table(**values)


def _takes(hint: Any, value: object) -> bool:
    """Whether a value of JSON has a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin is Annotated:
        return _takes(arguments[0], value) and arguments[1].holds(value)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_takes(each, value) for each in arguments)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_takes(arguments[0], x) for x in value)
    if origin is not None:
        return isinstance(value, origin)
    return type(value) in ((int, float) if hint is float else (hint,))


def describe(hint: Any) -> str:
    """The values of a type, for messages and the tables of the documentation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{describe(arguments[0])} {arguments[1]}"
    if origin is Literal:
        return ", ".join(each if isinstance(each, str) else json.dumps(each) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(map(describe, arguments))
    if origin in (list, tuple):
        return f"a list of {describe(arguments[0]).removeprefix('a ')}s"
    return NAMES.get(hint, "an object")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Key, default, values and description of each option under ``ascend``."""
    for name, table in _tables.items():
        yield from table_rows(table, f"ascend.{name}.")


def table_rows(table: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, default, values and description of each option of a table."""
    defaults = vars(table())
    for field in dataclasses.fields(table):
        text, values = field.metadata.get("text", ""), describe(hints(table)[field.name])
        yield f"{prefix}{field.name}", json.dumps(defaults[field.name]), values, text


def namespace(entry_point: str) -> str:
    """The name under ``ascend`` of a component's options: its entry point's without ``ascend_``, or
    ``platform``."""
    return "platform" if entry_point == "ascend" else entry_point.removeprefix("ascend_")


def register(namespace: str, table: type | Mapping[str, object] | None) -> None:
    """Add a component's table, or the defaults of options of any type."""
    if not isinstance(table, type):
        if not table and namespace in _tables:
            return
        fields = [(name, Any, option(default, "")) for name, default in (table or {}).items()]
        table = dataclasses.make_dataclass("Options", fields, frozen=True)
    _tables[namespace] = table


def listen(namespace: str, configured: Callable[[Mapping[str, object]], None]) -> None:
    """Call a function with a component's options whenever a configuration is taken."""
    _listeners[namespace] = configured


class Parsed(dict[str, object]):
    """vLLM's ``additional_config``, with the tables that are parsed from it.

    Processes that get a copy of the configuration parse theirs again: a table may be a class that
    only a component's registration makes.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self._parsed: dict[type, object] = {}

    def __reduce__(self) -> tuple[type[Parsed], tuple[dict[str, object]]]:
        return Parsed, (dict(self),)

    def table(self, table: type[Table]) -> Table:
        """The options of a component, given ones over defaults.

        Raises:
            RefusedError: as :func:`parse`.
        """
        if table not in self._parsed:
            namespace = next((name for name, each in _tables.items() if each is table), "")
            where = f"additional_config ascend.{namespace}"
            self._parsed[table] = parse(table, _ascend(self).get(namespace, {}), where)
        return typing.cast(Table, self._parsed[table])


def of(table: type[Table], vllm_config: Any = None) -> Table:
    """The options of a component in an engine's configuration.

    Args:
        vllm_config: of the engine; without one, vLLM's current one, where an engine is created,
            loads or updates weights. Elsewhere the options have their defaults.

    Raises:
        RefusedError: an unknown key, with the nearest known one, or a value of another type.
    """
    if vllm_config is None:
        vllm = sys.modules.get("vllm.config")  # this module does not import vLLM
        vllm_config = vllm and vllm.get_current_vllm_config_or_none()
    parsed = _parsed(vllm_config)
    return table() if parsed is None else parsed.table(table)


def _parsed(vllm_config: Any) -> Parsed | None:
    """The parsed options on a configuration; None if it has no options."""
    given = getattr(vllm_config, "additional_config", None)
    if isinstance(given, Mapping) and not isinstance(given, Parsed):
        given = vllm_config.additional_config = Parsed(given)
    return given if isinstance(given, Parsed) else None


def take(vllm_config: Any) -> None:
    """Parse the options of all components in an engine's configuration.

    Raises:
        RefusedError: as :func:`check`.
    """
    check(_parsed(vllm_config))


def check(additional_config: object) -> dict[str, object]:
    """The options of all components in vLLM's ``--additional-config``, by namespace.

    Raises:
        RefusedError: an unknown name or key, with the nearest known one, or an unsupported value.
    """
    given = additional_config if isinstance(additional_config, Mapping) else {}
    parsed = given if isinstance(given, Parsed) else Parsed(given)
    for name in _ascend(parsed):
        if name not in _tables:
            raise UnknownKeyError("additional_config ascend", name, _tables)
    return {name: parsed.table(table) for name, table in _tables.items()}


def configure(additional_config: object) -> None:
    """Check a configuration's ``ascend`` part, and hand each component its options.

    Raises:
        RefusedError: as :func:`check`.
    """
    found = check(additional_config)
    for name, configured in _listeners.items():
        configured(dict(vars(found[name])))


def platform_options(vllm_config: Any = None) -> Platform:
    """The options of the platform itself, as :func:`of`."""
    return of(Platform, vllm_config)


def rope_order(vllm_config: Any) -> str:
    """Order of the elements of latent attention's rotated keys in the KV cache: ``pairs``, as in
    the model, or ``halves``.

    KV caches of different orders have the same shape; with ``halves`` the even elements come first.
    """
    return "halves" if of(Platform, vllm_config).mla_prolog else "pairs"


def config(namespace: str) -> dict[str, object]:
    """The options of a component, given ones over defaults. ``namespace`` is its name without
    ``ascend-``.

    They are those of vLLM's current configuration, as in :func:`of`.
    """
    return dict(vars(of(_tables[namespace]))) if namespace in _tables else {}


def _ascend(additional_config: Mapping[str, object]) -> Mapping[str, object]:
    """The ``ascend`` part, an object of objects."""
    names = additional_config.get("ascend", {})
    if not isinstance(names, Mapping):
        found = f"additional_config ascend must be an object, not {names!r}"
        raise RefusedError(f'{found}; fix: write {{"NAME": {{…}}}} there')
    return names
