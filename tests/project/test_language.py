# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Language of the whole checkout: the style guide's tables of words and of syntax, comments, names
of tests."""

import ast
import functools
import re

import pytest
from harness import checkout
from harness.project import language

FEW_WORDS = 6  # A shorter comment may be a note, such as a unit or a shape.
TOOLS = "pip|torch|pydantic|xgrammar|vllm-ascend|numba|uv"
DIRECTIVE = re.compile(r"(?:type|fmt|ruff|pragma|clang-format|mypy)[: ]|noqa|SPDX|run: ")
BEGINNING = re.compile(rf"[A-Z\d`'\"(\[{{<$-]|(?:{TOOLS})\b|\S*[A-Z\d_.=(\[]\S")
END = re.compile(r"[.:?!…`]['\")]*$")
VAGUE_NAMES = {"far", "found", "made", "most", "others", "own", "said", "taken", "told"}
VAGUE_FIXTURE = re.compile(
    "asked|called|complete|far|found|fresh|given|goes_on|known|lines|made|marked|near|own|places|"
    "plain|played|printed|said|served|side|two|used|x"
)


@functools.cache
def prose() -> list[language.Text]:
    return list(language.texts())


def english_pages() -> list[language.Text]:
    """Pages for readers, without translations, reports, changelogs and generated ledgers."""
    no_page = re.compile(r"zh\b|reports/|changes/|CHANGELOG|^(tools|tests|harness)/")
    return [each for each in prose() if each.role == "page" and not no_page.search(each.path)]


def docstrings_of_wheels() -> list[language.Text]:
    """Docstrings of the wheels, which the reference pages show in part."""
    source = re.compile(r"packages/[\w-]+/src/")
    return [each for each in prose() if each.role == "docstring" and source.match(each.path)]


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
def tests_and_harness() -> list[str]:
    """Paths of the test modules, the conftests and the harness."""
    paths = {text.path for text in prose() if text.path.endswith(".py")}
    return [
        path for path in sorted(paths) if re.search(r"(^|/)(tests|harness)/|conftest\.py$", path)
    ]


@functools.cache
def definitions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of the test modules, the conftests and the harness, with their paths."""
    return [
        (path, node)
        for path in tests_and_harness()
        for node in functions(ast.parse((checkout.ROOT / path).read_text()))
    ]


def bound_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of what a module binds: parameters, variables, fields, functions, classes."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.append((node.lineno, name))
    return names


@pytest.mark.parametrize("rule", language.rules(), ids=lambda rule: rule.avoid)
def test_style_table(rule: language.Rule) -> None:
    assert [each for text in prose() for each in language.violations(text, [rule])] == []


@pytest.mark.parametrize("rule", language.rules("Syntax"), ids=lambda rule: rule.avoid)
def test_syntax_of_pages_and_docstrings(rule: language.Rule) -> None:
    texts = english_pages() + docstrings_of_wheels()
    assert len(english_pages()) > 50
    assert len(docstrings_of_wheels()) > 1000
    assert [each for text in texts for each in language.violations(text, [rule])] == []


def test_comments_are_sentences() -> None:
    comments = [text for text in prose() if text.role == "comment"]
    assert len(comments) > 1000
    assert [
        f"{each.path}:{each.line}: {' '.join(each.text.split())}"
        for each in comments
        if not is_sentence(each.text)
    ] == []


def test_names_say_what_a_thing_is() -> None:
    """Parameters, variables, fields and functions of the harness and of tests."""
    trees = {path: ast.parse((checkout.ROOT / path).read_text()) for path in tests_and_harness()}
    assert len(trees) > 300
    assert [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in bound_names(tree)
        if name.strip("_").lower() in VAGUE_NAMES
    ] == []


def test_fixtures_are_named_for_what_they_are() -> None:
    fixtures = [
        (path, node.name)
        for path, node in definitions()
        if any("fixture" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(fixtures) > 10
    assert [each for each in fixtures if VAGUE_FIXTURE.fullmatch(each[1])] == []


def test_bound_names_are_all_listed() -> None:
    source = "class A:\n    b: int\n    def c(self, d, *e):\n        f, (g, *h) = d\n        self.i = (j := 1)"
    names = [name for _, name in bound_names(ast.parse(source))]
    assert sorted(names) == ["A", "b", "c", "d", "e", "f", "g", "h", "i", "j", "self"]


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
    result = [
        each
        for text in language.texts_of(path, "x = 'room'\n" + source)
        for each in language.violations(text, language.rules())
        if text.role == role
    ]
    assert len(result) == 1
    assert result[0].startswith(f"{path}:2: {role}: ")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("The executors are vLLM's.", "vLLM's executors start it. It's used."),
        ("It has words of which one is used.", "It uses one of these words."),
        ("vLLM has it, the wheel has none.", "vLLM supports it. The wheel has one option."),
        ("Both attend to as many keys.", "It takes as many streams as a graph."),
        ("The difference, and the same of vLLM.", "The same value on both."),
        ("A is stored, and so is B.", "A is stored, and so the step is faster."),
        ("A step takes the host 4 ms.", "A step takes 4 ms of the host."),
        ("- **a step that has no tokens**: fails", "- **a step**: fails. It is **not** run."),
        ("**Registration.** Plugins are loaded.", "**Both** are loaded."),
        ("- `a`: one: two: three", "- `a`: one\n- `b`: two"),
        ("Also refused are windows.", "These are supported. Windows are also refused."),
        ("The others wait for good.", "They wait forever, for a good reason."),
        ("These models have 4.", "These models have 4 heads, in 0.5 s."),
    ],
)
def test_syntax(wrong: str, right: str) -> None:
    def result(text: str) -> list[str]:
        return language.violations(
            language.Text("page.md", 1, "page", text), language.rules("Syntax")
        )

    assert len({each.partition("write:")[2] for each in result(wrong)}) == 1
    assert result(right) == []


@pytest.mark.parametrize(
    "comment",
    [
        "of vLLM's own prefill, which the profile run would reserve.",
        "The driver returns the number of all NPUs here",
    ],
)
def test_fragment_is_no_sentence(comment: str) -> None:
    assert not is_sentence(comment)
