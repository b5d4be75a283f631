# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Docstrings as mkdocstrings' parser reads them: sections with one entry for each argument,
attribute and exception."""

import logging
import re
from collections.abc import Iterator

import griffe
import pytest
from harness import checkout

PACKAGES = sorted(path.parent.name for path in checkout.ROOT.glob("packages/*/src"))
SECTIONS = {griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters}


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def objects(module: griffe.Object | griffe.Alias) -> Iterator[griffe.Object]:
    if not isinstance(module, griffe.Alias):
        yield module
        for member in module.members.values():
            yield from objects(member)


def run_together(result: griffe.Object) -> Iterator[str]:
    """Entries whose description contains the next entry: ``a: one. b: two.``"""
    assert result.docstring is not None
    parameters = getattr(result, "parameters", ())
    names = {*result.members, *(each.name for each in parameters)}
    for section in result.docstring.parse(griffe.Parser.google):
        for entry in section.value if section.kind in SECTIONS else ():
            for inner in re.findall(r"[.;]\s+(\w+)(?:,\s+\w+)*:\s", entry.description):
                if inner in names:
                    yield f"{result.path}: {inner} in the description of {entry.name}"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    handler, logger = Warnings(), logging.getLogger("griffe")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("package", PACKAGES)
def test_parser_of_the_pages_understands_docstrings(package: str, warnings: list[str]) -> None:
    source = checkout.ROOT / "packages" / package / "src"
    name = package.replace("-", "_")
    if not (source / name / "__init__.py").is_file():
        pytest.skip("a wheel without code")
    module = griffe.load(name, search_paths=[source], allow_inspection=False, resolve_aliases=False)
    documented = [each for each in objects(module) if each.docstring]
    assert len(documented) > 10
    assert [line for each in documented for line in run_together(each)] == []
    assert warnings == []


def test_a_rewrapped_docstring_is_found(warnings: list[str]) -> None:
    text = (
        '"""A chip.\n\n    Attributes:\n        name: of the family; it is also in\n'
        '        logs. streams: of an NPU. dtypes: of models.\n    """'
    )
    with griffe.temporary_visited_module(
        f"class Chip:\n    {text}\n    name: str\n    streams: int\n    dtypes: str\n"
    ) as module:
        result = [*run_together(module["Chip"])]
    assert warnings or result
    joined = text.replace("it is also in\n        logs. ", "logs. ")
    with griffe.temporary_visited_module(
        f"class Chip:\n    {joined}\n    name: str\n    streams: int\n    dtypes: str\n"
    ) as module:
        inner = [line.partition(": ")[2] for line in run_together(module["Chip"])]
    assert inner == [f"{name} in the description of name" for name in ("streams", "dtypes")]
