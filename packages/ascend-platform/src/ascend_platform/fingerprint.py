# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fingerprints of source code, read from a source tree or an installed package without importing
it.

Patches (ascend-patches) and overrides (``overrides/``) compare vLLM's source with what they
were written for.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path


def fingerprint(source: str, qualname: str) -> str:
    """A hash of a function, method, class or assigned name in a module's source; "" if it is not
    there.

    Comments, formatting, docstrings and the version of Python that parses it do not count.
    ``torch.cuda.*`` stands for the set of attributes of ``torch.cuda`` that the module uses.
    """
    if qualname.endswith(".*"):
        shapes = sorted(_attributes(source, qualname.removesuffix("*")))
    else:
        shapes = [_shape(node) for node in definitions(source, qualname)]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:12] if shapes else ""


@functools.lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """The syntax tree of the last source; tens of megabytes for a large module, so that users clear
    the cache."""
    return ast.parse(source)


def definitions(source: str, qualname: str) -> list[ast.AST]:
    """Syntax trees of a name's definitions and assignments."""
    *owners, last = names = qualname.split(".")
    text = source
    for depth, name in enumerate(names):
        text = text and _excerpt(text, name, "    " * depth)
    if text:  # Most of the time of an engine's check would be trees of whole modules.
        with contextlib.suppress(SyntaxError):
            tree: ast.AST = ast.parse(f"if 1:\n{text}" if owners else text)
            return list(_named(tree, last))
    nodes: list[ast.AST] = [parsed(source)]
    for name in names:
        nodes = [found for node in nodes for found in _named(node, name)]
    return nodes


def _excerpt(source: str, name: str, indent: str) -> str:
    """The text of a name's only definition, with its decorators; "" where a search cannot tell.

    It is cut before the next statement. A cut within a string is an error of syntax.
    """
    pattern = rf"^( *)(?:(?:(?:async +)?def|class) +{name}\b|{name} *[:=](?!=))"
    found = list(re.finditer(pattern, source, re.M))
    if len(found) != 1 or found[0][1] != indent:
        return ""
    starts = [match.start() for match in re.finditer(rf"^{indent}[@\w]", source, re.M)]
    first = bisect.bisect(starts, found[0].start()) - 1
    end = starts[first + 1] if first + 1 < len(starts) else len(source)
    while first and source.startswith(f"{indent}@", starts[first - 1]):
        first -= 1
    return source[starts[first] : end]


def _attributes(source: str, prefix: str) -> set[str]:
    """The dotted names that are one attribute longer than ``prefix``, which ends with a dot."""
    owner = prefix.removesuffix(".")
    last = owner.rpartition(".")[2]
    lines, parts = source.splitlines(), list[ast.AST]([parsed(source)])
    found: set[str] = set()
    for part in parts:  # Only statements whose lines have the name are searched.
        if isinstance(part, (ast.Module, ast.ClassDef)):
            parts += ast.iter_child_nodes(part)
            continue
        decorated = (part, *getattr(part, "decorator_list", ()))
        first = min(getattr(node, "lineno", 1) for node in decorated) - 1
        if last in "\n".join(lines[first : getattr(part, "end_lineno", None)]):
            found |= {
                ast.unparse(node)
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute)
                and getattr(node.value, "attr" if "." in owner else "id", "") == last
                and ast.unparse(node.value) == owner
            }
    return found


def module_source(module: str, tree: Path | None = None) -> str | None:
    """The source text of a module, which is not imported; None if there is none. ``tree`` as for
    :func:`locate`."""
    path = locate(module, tree)
    return None if path is None else path.read_text()


def drift(target: str, supported: Iterable[str], source: str | None) -> str:
    """The difference between a target and the source that is supported; "" if there is none.

    Args:
        target: ``package.module:qualified.name``.
        supported: its fingerprints in the supported versions.
        source: the text of its module; None if there is no such module.
    """
    module, _, qualname = target.partition(":")
    if source is None:
        return f"target {target} is missing: no module {module}"
    if not (found := fingerprint(source, qualname)):
        return f"target {target} is missing: {module} does not define {qualname}"
    supported = tuple(dict.fromkeys(supported))
    if found in supported:
        return ""
    return f"target {target} has changed: found {found}, expected {' or '.join(supported)}"


def locate(module: str, tree: Path | None = None) -> Path | None:
    """The file of a module, in `tree` (a checkout or a site-packages) if its top package is there,
    else as installed."""
    top, *rest = module.split(".")
    if tree is not None and (tree / top).is_dir():
        base = tree / top
    else:
        spec = importlib.util.find_spec(top)  # a top-level name: nothing is imported
        if spec is None or not spec.submodule_search_locations:
            return Path(spec.origin) if spec and spec.origin and not rest else None
        base = Path(next(iter(spec.submodule_search_locations)))
    path = base.joinpath(*rest)
    files = ([path.with_suffix(".py")] if rest else []) + [path / "__init__.py"]
    return next((file for file in files if file.is_file()), None)


def tree_version(tree: Path) -> str:
    """vLLM's version in a checkout or a site-packages; "" if it is not recorded there."""
    for info in sorted(tree.glob("vllm-*.dist-info")):
        return info.name.removeprefix("vllm-").removesuffix(".dist-info")
    written = tree / "vllm" / "_version.py"
    text = written.read_text() if written.is_file() else ""
    found = re.search(r"^__version__ = .*?['\"]([^'\"]+)", text, re.M)
    return found[1] if found else ""


def _named(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Definitions and assignments of a name in a module or class, also under ``if``, ``try`` and
    ``with``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if child.name == name:
                yield child
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _named(child, name)


def _shape(value: object) -> str:
    # Not ast.dump, because its fields and omissions differ between Python versions.
    if isinstance(value, list):
        return f"[{','.join(map(_shape, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(value, definitions) and ast.get_docstring(value) is not None:
        fields["body"] = value.body[1:]
    shown = (
        f"{name}={_shape(field)}"
        for name, field in fields.items()
        if field not in (None, []) and name != "type_comment"
    )
    return f"{type(value).__name__}({','.join(shown)})"
