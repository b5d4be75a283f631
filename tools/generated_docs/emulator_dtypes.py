#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Write which dtypes the emulator's operators take, from torch_npu's documentation.

tools/generated_docs/emulator_dtypes.py --docs DIR --op-plugin DIR    rewrite the emulator's
facts/dtypes.toml … --explain aclnnMul    print where an operator's dtypes come from

--docs is docs/zh/api/native_api/pytorch_<version> of Ascend/pytorch: for each function of torch,
the dtypes that `input` (or `self`) may have. --op-plugin is op_plugin of Ascend/op-plugin: which
aclnn operator a function calls (gen_opapi in its configuration, EXEC_NPU_CMD in its sources), with
that tensor first. An operator gets what any of its functions has, and the rest of its class: the
documentation lists what was verified, and a refusal of what works is worse than a missing one. What
NPUs did in PyTorch's own tests (emulator_verdicts.toml) goes before both.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path

TARGET = (
    Path(__file__).resolve().parents[2]
    / "packages/ascend-emulator/src/ascend_emulator/facts/dtypes.toml"
)
VERDICTS = Path(__file__).with_name("emulator_verdicts.toml")
# In the order in which they are printed.
DTYPES = (
    "bf16",
    "fp16",
    "fp32",
    "fp64",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
)
ALL = set(DTYPES)
INTEGERS = {"uint8", "int8", "int16", "int32", "int64"}
COMPLEX = {"complex64", "complex128"}
PAGES = (
    "torch",
    "torch-Tensor",
    "torch-nn-functional",
    "torch-nn",
    "torch-special",
    "torch-linalg",
    "torch-fft",
)
FIRST = re.compile(r"(self|input|tensors|tensor_list)\w*$")

# Dtypes that work beyond the documentation: operator to dtypes and the source.
WIDER: dict[str, tuple[str, str]] = {
    "aclnnCeil": (" ".join(INTEGERS), "op-plugin's test_ceil.py, test_ceil_integer_identity_npu"),
    "aclnnTrunc": (" ".join(INTEGERS), "as aclnnCeil"),
    "aclnnHardsigmoid": (" ".join(INTEGERS), "op-plugin's test_hardsigmoid.py, test_hardsigmoid"),
    "aclnnInplaceHardsigmoid": (" ".join(INTEGERS), "as aclnnHardsigmoid"),
    "aclnnInplaceNormal": (
        "fp64 bool " + " ".join(INTEGERS),
        "torch_npu's test_dlpack.py, op-plugin's test_npu_gather_sparse_index.py",
    ),
    "aclnnFloorDivides": ("bool", "op-plugin's test_floordivide.py, test_floor_divide_scalar_bool"),
}
# The same without the rest of the dtypes' class.
ALONE: dict[str, tuple[str, str]] = {"aclnnHistc": ("int32", "op-plugin's HistcKernelNpu.cpp")}
# Operators that many functions use for tensors of their own, so that what one function's page says
# is no limit.
LEFT_OUT = {
    "aclnnInplaceCopy",
    "aclnnCast",
    "aclnnIndex",
    "aclnnIndexPutImpl",
    "aclnnInplaceZero",
    "aclnnInplaceOne",
}
HEADER = """\
# Written by tools/generated_docs/emulator_dtypes.py from torch_npu's documentation for {version}:
# what an operator's first argument may be on Atlas A2 and A3. Wider than the documentation, which
# lists what was verified: bfloat16 goes with float16, an integer type with the others and float64,
# a complex type with float64. Where NPUs took or refused a dtype in PyTorch's own tests, that
# counts (emulator_verdicts.toml: "on A3"). Operators that are not here have no rule: the
# documentation does not say, or what it says is about something else. Operators are below the
# dtypes that they have, without "aclnn"; `--explain OPERATOR` has the reasons.
"""


def documented(directory: Path) -> dict[str, list[set[str]]]:
    """Function to the sets of dtypes on its pages; an empty set stands for a page without
    a limit."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    entry = re.compile(
        r"^(?:### |> <font size=\"3\">)(\S+?)(?:\(\))?(?:</font>)?$(.*?)(?=^### |^> <font|\Z)",
        re.M | re.S,
    )
    for page in PAGES:
        for heading, body in entry.findall((directory / f"{page}.md").read_text()):
            name = heading.rsplit(".", 1)[-1].rstrip("_")
            if "| ✔ |" not in body or name[0].isupper():  # not there, or a module: torch.nn.SiLU
                continue
            if heading.startswith(("torch.linalg.", "torch.fft.")):
                name = f"{heading.split('.')[1]}_{name}"
            limits = re.findall(r"`(?:input|self)`仅支持([^\n]*)", body)
            words = [
                set(re.findall(r"[a-z]+\d+|bool", limit.replace("double", "fp64"))) & ALL
                for limit in limits
            ]
            found[name].append(set().union(*words))
    return found


def callers_in(bodies: dict[str, str], name: str) -> set[str]:
    """The function and, in turn, those of its file that call it."""
    seen, above = set(), {name}
    while above:
        seen |= above
        called = re.compile(r"\b(" + "|".join(above) + r")\(")
        above = {other for other, text in bodies.items() if called.search(text)} - seen
    return seen


def calls(directory: Path) -> dict[str, set[str]]:
    """Operator to the torch functions that call it with their first tensor first."""
    callers: dict[str, set[str]] = defaultdict(set)
    text = (directory / "config" / "op_plugin_functions.yaml").read_text()
    for function, body in re.findall(
        r"^  - func: (\S+?)\((.*?)(?=^  - func|^\w|\Z)", text, re.M | re.S
    ):
        operator = re.search(r"^ +exec: (aclnn\w+)(?:, *(\w+))?", body, re.M)
        if operator and body.startswith("Tensor") and FIRST.match(operator[2] or "self"):
            callers[operator[1]].add(function.split(".")[0].strip("_"))
    definition = re.compile(
        r"^(?:static |inline )*[\w:<>, ]+[&>]? ?&?(\w+)\([^;{]*?\)\n?\s*\{\n(.*?)^\}", re.M | re.S
    )
    ending = re.compile(r"(_out|_npu_no_?check|_nocheck|_opapi|_common|_symint)+$")
    for source in (directory / "ops" / "opapi").rglob("*.cpp"):
        bodies: dict[str, str] = defaultdict(str)
        for name, body in definition.findall(source.read_text()):
            bodies[name] += body
        for name, body in bodies.items():
            for operator, first in re.findall(r"EXEC_NPU_CMD\((aclnn\w+), *(\w+)", body):
                if FIRST.match(first):
                    callers[operator] |= {
                        ending.sub("", each).strip("_") for each in callers_in(bodies, name)
                    }
    return callers


def table(docs: Path, op_plugin: Path) -> dict[str, tuple[set[str], list[str]]]:
    """Operator to its dtypes and the functions they are from."""
    pages, rows = documented(docs), {}
    for operator, functions in sorted(calls(op_plugin).items()):
        known = sorted(function for function in functions if function in pages)
        sets = [dtypes for function in known for dtypes in pages[function]]
        if operator in LEFT_OUT or not sets or not all(sets):
            continue
        dtypes = set().union(*sets) | set(WIDER.get(operator, ("", ""))[0].split())
        if "fp16" in dtypes:
            # The documentation omits it although every bfloat16 model uses it: matmul, silu.
            dtypes.add("bf16")
        if dtypes & INTEGERS:
            dtypes |= INTEGERS
        if dtypes & INTEGERS and "fp32" in dtypes:
            # General arithmetic, which the AI CPU computes if the vector cores do not.
            dtypes.add("fp64")
        if dtypes & COMPLEX:
            dtypes |= COMPLEX | {"fp64"}
        dtypes |= set(ALONE.get(operator, ("", ""))[0].split())
        if dtypes != ALL:
            rows[operator] = dtypes, known
    verdicts = tomllib.loads(VERDICTS.read_text())
    for kind, change in (("refused", set.difference), ("taken", set.union)):
        for operator, listed in verdicts[kind].items():
            given = set(listed.split())
            if unknown := given - ALL:
                sys.exit(
                    f"emulator-dtypes: {VERDICTS.name}: {operator} has {', '.join(sorted(unknown))}"
                )
            if operator in rows or kind == "refused":  # no row: everything is taken
                dtypes, known = rows.get(operator, (ALL - COMPLEX, []))
                rows[operator] = change(dtypes, given), [*known, f"{kind} on A3: {listed}"]
    return dict(sorted(rows.items()))


def text_of(rows: dict[str, set[str]]) -> str:
    """The rows of the table, each with the operators of one set of dtypes."""
    groups: dict[str, list[str]] = defaultdict(list)
    for operator, dtypes in rows.items():
        names = " ".join(dtype for dtype in DTYPES if dtype in dtypes)
        groups[names].append(operator.removeprefix("aclnn"))
    return "".join(
        f'\n"{names}" = """\n{textwrap.fill(" ".join(operators), 100)}\n"""\n'
        for names, operators in sorted(groups.items())
    )


def main() -> None:
    """Parse the command line and write the table or the explanation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--op-plugin", type=Path, required=True)
    parser.add_argument("--explain", metavar="OPERATOR")
    arguments = parser.parse_args()
    rows = table(arguments.docs, arguments.op_plugin)
    if not rows:
        sys.exit("emulator-dtypes: found nothing; are these the right directories?")
    if arguments.explain:
        print(rows.get(arguments.explain, f"no rule for {arguments.explain}"))
        for widened in (WIDER, ALONE):
            print(*widened.get(arguments.explain, ()))
        return
    header = HEADER.format(version=arguments.docs.resolve().name.replace("_", " "))
    TARGET.write_text(header + text_of({operator: row[0] for operator, row in rows.items()}))
    print(f"emulator-dtypes: {len(rows)} operators")


if __name__ == "__main__":
    main()
