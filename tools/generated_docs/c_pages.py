# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The page of the emulator's C API: functions for operators of one's own, from their header, and
the public functions of CANN that its libraries export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ascend_emulator import facts
from ascend_emulator.build import SONAMES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "ascend-emulator" / "src" / "ascend_emulator"
HEADER = PACKAGE / "csrc" / "include" / "ascend_emulator" / "operator.h"
CUSTOM = PACKAGE / "csrc" / "operator" / "custom.cpp"
HEAD = """# C API of the emulator

Functions of the emulator's libraries for C and C++: a few for [operators of your own](emulator.md#operators-of-your-own), and the
functions of CANN with their signatures.

A program that is linked against CANN, or loads its libraries by name, gets the emulator's when it is started by
`ascend-emulator run`: {libraries}.

## Operators of your own

Declared in `ascend_emulator/operator.h`, which needs no other header of the emulator. In C++ with ATen, the macro at the end is
enough. Without it, look the functions up in `libascend_emulator.so`; the header has their types.
"""
CANN = """
## Functions of CANN

Each function of CANN's public headers is exported. A listed one does what CANN documents, or accepts the call without effect on
results; the others fail and name themselves. [Supported operators](emulator-capability.md) has the source file of each.

An operator `aclnnXxx` has CANN's two functions: `aclnnXxxGetWorkspaceSize`, with the listed parameters and then `uint64_t*` and
`aclOpExecutor**`, and `aclnnXxx(void*, uint64_t, aclOpExecutor*, aclrtStream)`.
"""
GROUPS = {
    "aclrt": "Runtime (`aclrt`)",
    "aclmdl": "Graphs (`aclmdl`)",
    "Hccl": "Collectives (`Hccl`)",
    "aclprof": "Profiling (`aclprof`)",
    "acl": "Other (`acl`)",
    "aclnn": "Operators (`aclnn`)",
}
TYPES = {
    "T": "const aclTensor*",
    "L": "const aclTensorList*",
    "S": "const aclScalar*",
    "R": "const aclScalarList*",
    "I": "const aclIntArray*",
    "F": "const aclFloatArray*",
    "B": "const aclBoolArray*",
    "t": "const char*",
    "i": "int64_t",
    "n": "int32_t",
    "c": "int8_t",
    "b": "bool",
    "d": "double",
    "f": "float",
    "?": "…",
}


def pages() -> dict[str, str]:
    """Text of the page, by its path below docs."""
    libraries = ", ".join(f"`{name}`" for name in SONAMES)
    own = "\n".join(_declarations())
    return {"api-emulator-c.md": f"{HEAD.format(libraries=libraries)}\n{own}\n{CANN}\n{_cann()}"}


def _declarations() -> Iterator[str]:
    """A heading, the comment and the code of each declaration of the header's C part, then the
    macro for C++."""
    text = HEADER.read_text()
    exported = re.findall(r"^EXPORT \w+ (ascend_emulator_\w+)", CUSTOM.read_text(), re.MULTILINE)
    symbols = sorted(exported, key=len, reverse=True)
    part = text.partition('extern "C" {\n#endif\n')[2].partition("#ifdef __cplusplus")[0]
    for block in re.split(r"\n\s*\n|(?<=;)\n(?=//)|(?<=;)\n(?=typedef)", part.strip()):
        comment = re.match(r"(?:// .*\n)*", block)
        assert comment
        code = block[comment.end() :]
        name = re.search(r"(\w+)(?:;|\)?\()(?!.*\bAscendEmulator\w+;)", code, re.DOTALL)
        assert name, code
        prose = re.sub(r"^// ", "", comment[0], flags=re.MULTILINE)
        symbol = next(
            (each for each in symbols if name[1].lower().startswith(each.replace("_", ""))), ""
        )
        yield f"### {symbol or name[1]}\n\n{prose}\n```c\n{code}\n```\n"
    example = re.search(r"(?://   .*\n|//\n|// out\), \{\n)+", text)
    assert example
    yield "### ASCEND_EMULATOR_OPERATOR\n"
    yield "```cpp\n" + re.sub(r"^// ?(?:  )?", "", example[0], flags=re.MULTILINE).strip() + "\n```"


def _cann() -> str:
    names = {line.split()[0] for line in (PACKAGE / "cann_names.txt").read_text().splitlines()}
    operators = facts.arguments()
    page = (ROOT / "docs" / "emulator-capability.md").read_text()
    listed = page.partition("<!-- begin: emulator-names -->")[2].partition("### Refused")[0]
    computed = set(re.findall(r"\b(?:acl|Hccl)\w+", listed))
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in sorted(names | computed | operators.keys()):
        prefix = max((each for each in GROUPS if name.startswith(each)), key=len, default="")
        if prefix:
            groups[prefix].append(name)
    return "\n".join(
        _group(title, groups[prefix], computed, operators) for prefix, title in GROUPS.items()
    )


def _group(title: str, names: list[str], computed: set[str], operators: dict[str, str]) -> str:
    done = [
        f"{name}({_types(operators[name])})" if name in operators else name
        for name in names
        if name in computed
    ]
    refused = ", ".join(name for name in names if name not in computed)
    lines = "".join(f"<li><code>{each}</code></li>" for each in done)
    return (
        f"### {title}\n\n{len(done)} of {len(names)}; the others refuse.\n\n"
        f"<ul data-search-exclude>{lines}</ul>\n\n<p data-search-exclude>Refused: {refused}</p>\n"
    )


def _types(codes: str) -> str:
    return ", ".join(TYPES[code] for code in codes)
