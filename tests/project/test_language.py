# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Language of the whole checkout: the style guide's table of words, comments, names of tests."""

import ast
import functools
import re

import pytest
from harness import checkout, language

LONGEST_NAME = 60
FEW_WORDS = 6  # A shorter comment may be a note, such as a unit or a shape.
TOOLS = "pip|torch|pydantic|xgrammar|vllm-ascend|numba|uv"
DIRECTIVE = re.compile(r"(?:type|fmt|ruff|pragma|clang-format|mypy)[: ]|noqa|SPDX|run: ")
BEGINNING = re.compile(rf"[A-Z\d`'\"(\[{{<$-]|(?:{TOOLS})\b|\S*[A-Z\d_.=(\[]\S")
END = re.compile(r"[.:?!…`]['\")]*$")
VAGUE_FIXTURE = re.compile(
    "asked|called|complete|far|found|fresh|given|goes_on|known|lines|made|marked|near|own|places|"
    "plain|played|printed|said|served|side|two|used|x"
)


@functools.cache
def prose() -> list[language.Text]:
    return list(language.texts())


def is_sentence(comment: str) -> bool:
    """Whether a comment is short, a directive, or begins and ends as a sentence."""
    text = re.sub(r"\s*#?\s*noqa(: \S+)?$", "", " ".join(comment.split()))
    if len(text.split()) <= FEW_WORDS or DIRECTIVE.match(text):
        return True
    return bool(BEGINNING.match(text) and END.search(text))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@functools.cache
def definitions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of the test modules, the conftests and the harness, with their paths."""
    paths = {text.path for text in prose() if text.path.endswith(".py")}
    return [
        (path, node)
        for path in sorted(paths)
        if re.search(r"(^|/)(tests|harness)/|conftest\.py$", path)
        for node in functions(ast.parse((checkout.ROOT / path).read_text()))
    ]


@pytest.mark.parametrize("rule", language.rules(), ids=lambda rule: rule.avoid)
def test_style_table(rule: language.Rule) -> None:
    assert [each for text in prose() for each in language.found(text, [rule])] == []


def test_comments_are_sentences() -> None:
    comments = [text for text in prose() if text.role == "comment"]
    assert len(comments) > 1000
    assert [
        f"{each.path}:{each.line}: {' '.join(each.text.split())}"
        for each in comments
        if not is_sentence(each.text)
    ] == []


def test_names_of_tests_have_at_most_60_characters() -> None:
    names = [(path, node.name) for path, node in definitions() if node.name.startswith("test_")]
    assert len(names) > 1000
    assert [each for each in names if len(each[1]) > LONGEST_NAME] == []


def test_fixtures_are_named_for_what_they_are() -> None:
    fixtures = [
        (path, node.name)
        for path, node in definitions()
        if any("fixture" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(fixtures) > 10
    assert [each for each in fixtures if VAGUE_FIXTURE.fullmatch(each[1])] == []


@pytest.mark.parametrize(
    ("path", "source", "role"),
    [
        ("module.py", "x = 1  # Scores for tokens of " + "no request.", "comment"),
        ("module.py", '"""Lists all k' + 'inds of models."""', "docstring"),
        ("module.py", 'raise ValueError(f"{name} has no r' + 'oom")', "message"),
        ("module.cpp", 'f("no r' + 'oom");  // The host gives ' + "back memory.", "C++"),
        ("page.md", "`room` is code, and a wait of " + "the host is prose.", "page"),
    ],
    ids=["comment", "docstring", "message", "C++", "page"],
)
def test_violation_is_found_once(path: str, source: str, role: str) -> None:
    """In code that is not prose, the same words are allowed."""
    found = [
        each
        for text in language.texts_of(path, "x = 'room'\n" + source)
        for each in language.found(text, language.rules())
        if text.role == role
    ]
    assert len(found) == 1
    assert found[0].startswith(f"{path}:2: {role}: ")


@pytest.mark.parametrize(
    "comment",
    [
        "of vLLM's own prefill, which the profile run would reserve.",
        "The driver returns the number of all NPUs here",
    ],
)
def test_fragment_is_no_sentence(comment: str) -> None:
    assert not is_sentence(comment)
