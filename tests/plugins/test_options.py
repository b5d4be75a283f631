# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of all wheels: documented keys are known, the doctor takes them, wrong types are refused
in one line."""

import ast
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ascend_kv_connector.config import Options as ConnectorOptions
from ascend_kv_connector.store.options import StoreOptions
from ascend_model_loader.options import Options as LoaderOptions
from ascend_model_loader.options import parse_options
from ascend_platform import options
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import COMPONENTS
from harness import checkout
from harness.project.doctor import examine

WRONG = (5, 1.5, "x", True, None, [1], {"a": {}}, [], {})
"""Values of every type that JSON has; an option takes some of them."""


@pytest.fixture(scope="module")
def known_options() -> dict[str, dict[str, object]]:
    """Of each component's name in ``--additional-config``: keys and defaults."""
    for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        if point.name in COMPONENTS.values():
            point.load()()
    return {
        name: options.config(name)
        for name in map(options.namespace, COMPONENTS.values())
        if options.config(name)
    }


def documented() -> set[tuple[str, str]]:
    """Component and key of the headings of the configuration page."""
    text = (checkout.ROOT / "docs" / "configuration.md").read_text()
    return set(re.findall(r"^### `ascend\.(\w+)\.(\w+)`$", text, re.MULTILINE))


def test_every_option_is_documented_and_no_other(known_options):
    assert {(name, key) for name, keys in known_options.items() for key in keys} == documented()


def test_doctor_takes_every_documented_option(known_options):
    given: dict[str, dict[str, object]] = {}
    for name, key in documented():
        given.setdefault(name, {})[key] = known_options[name][key]
    _, lines = examine("--additional-config", json.dumps({"ascend": given}))
    assert lines["configuration", "--additional-config"][:2] == ("ok", "known keys only")


def refusals(take: Callable[[Any], object], values: Any = WRONG) -> Iterator[str]:
    """The messages, of one line, for the values that are refused; other exceptions fail
    the test."""
    for value in values:
        try:
            take(value)
        except RefusedError as error:
            yield str(error)


def test_wrong_types_of_each_option_are_refused_in_one_line(known_options, monkeypatch):
    for variable in ("HCCL_DETERMINISTIC", "HCCL_CONNECT_TIMEOUT", "VLLM_ASCEND_DISABLE_PATCHES"):
        monkeypatch.setenv(variable, "")
    for name, keys in known_options.items():
        for key in keys:
            messages = list(
                refusals(
                    lambda value, name=name, key=key: options.configure(
                        {"ascend": {name: {key: value}}}
                    )
                )
            )
            assert len(messages) >= 6, (name, key, messages)
            assert all(f"ascend.{name}.{key}" in line and "\n" not in line for line in messages), (
                messages
            )
    options.configure({})


@pytest.mark.parametrize("take", [options.configure, options.check], ids=lambda take: take.__name__)
def test_wrong_types_of_objects_are_refused_in_one_line(known_options, take):
    assert len(list(refusals(lambda value: take({"ascend": value})))) == 8
    for name in known_options:
        assert len(list(refusals(lambda value, name=name: take({"ascend": {name: value}})))) == 8


def test_options_are_checked_where_they_are_read():
    """Which hook of vLLM reads an option first is vLLM's choice."""
    from types import SimpleNamespace

    for ascend in (
        "x",
        [1],
        {"platform": 5},
        {"platform": {"numa_bind": 1}},
        {"platform": {"numabind": True}},
    ):
        config = SimpleNamespace(additional_config={"ascend": ascend})
        with pytest.raises(RefusedError, match=r"^additional_config [^\n]*$"):
            options.of(options.Platform, config)


@pytest.mark.parametrize(
    ("take", "keys"),
    [
        (ConnectorOptions.from_config, ConnectorOptions.__dataclass_fields__),
        (StoreOptions.from_config, StoreOptions.__dataclass_fields__),
        (parse_options, LoaderOptions.__dataclass_fields__),
    ],
    ids=["connector", "store", "loader"],
)
def test_wrong_connector_and_loader_types_are_refused(take, keys, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_WEIGHTS_SECRET", "a secret of sixteen bytes")
    for key in keys:
        messages = list(refusals(lambda value, key=key: take({key: value})))
        assert len(messages) >= 5, (key, messages)
        assert all(key in line and "\n" not in line for line in messages), messages


READERS = {
    "ascend_platform/activation.py",  # Hands them to the components.
    "ascend_cli/checks.py",  # The doctor's argument of this name.
    "ascend_platform/options.py",  # Keeps the tables there.
    "ascend_platform/ops/features.py",  # vLLM's own key gdn_prefill_backend.
}
"""Files that read ``additional_config``; all others read a table."""


def reads_beside_tables(tree: ast.Module) -> list[int]:
    """Lines that take a single value from ``config(NAME)``, which goes whole into its table."""
    words = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    tables = {id(word.value) for word in words if word.arg is None}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "config"
        and getattr(node.func.value, "id", "") in ("extension", "options")
        and id(node) not in tables
    ]


def test_product_code_reads_options_from_tables():
    result, beside = set(), []
    for source in checkout.ROOT.glob("packages/*/src"):
        for path in source.rglob("*.py"):
            text, name = path.read_text(), str(path.relative_to(source))
            if "ascend_emulator" in name or "config" not in text:
                continue
            tree = ast.parse(text)
            beside += [f"{name}:{line}" for line in reads_beside_tables(tree)]
            if any(getattr(node, "attr", "") == "additional_config" for node in ast.walk(tree)):
                result.add(name)
    assert (result, beside) == (READERS, [])


def test_a_read_beside_the_table_is_found():
    tree = ast.parse("a = extension.config('x')['key']\nb = Options(**extension.config('x'))\n")
    assert reads_beside_tables(tree) == [1]
