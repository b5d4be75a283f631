#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Write how op-plugin calls CANN's operators: the C type of each argument, with which the
emulator's parameters are compared.

tools/generated_docs/emulator_arguments.py --op-plugin DIR    rewrite the emulator's
facts/arguments.toml … --explain aclnnMul    print the operator's calls

DIR is op_plugin of Ascend/op-plugin at the commit of tools/upstream_tests/torch_npu.toml. Calls are
EXEC_NPU_CMD in its sources, whose arguments' types are those of the declarations in the calling
function, and gen_opapi in its configuration, whose types are the schema's. What cannot be told by
these means, such as an `auto` or a nested call, is "?", which agrees with all types; an operator
whose calls have different numbers of arguments is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

TARGET = (
    Path(__file__).resolve().parents[2]
    / "packages/ascend-emulator/src/ascend_emulator/facts/arguments.toml"
)
HEADER = """\
# Written by tools/generated_docs/emulator_arguments.py from op-plugin's calls: the C types of an
# operator's arguments. T aclTensor, L aclTensorList, S aclScalar, R aclScalarList, I aclIntArray,
# F aclFloatArray, B aclBoolArray, t char*, i 64 bits, n 32 bits, c int8_t, b bool, d double, f
# float, ? any. Names are without "aclnn".
"""
# C++ types, without const, references and c10::optional, to C types (ConvertType in
# op_plugin/utils/op_api_common_base.h).
TYPES = {
    "T": r"(at::)?Tensor|TensorWrapper|torch_npu::TensorWrapper",
    "L": (
        r"(at::)?(TensorList|ITensorListRef)|(at::)?ArrayRef<(at::)?Tensor>|std::vector<(at::)?Tensor>|TensorListWrapper"
    ),
    "S": r"(at::|c10::)?Scalar",
    "R": r"(at::)?ArrayRef<(at::)?Scalar>",
    "I": (
        r"(at::|c10::)?(IntArrayRef|OptionalIntArrayRef|SymIntArrayRef|OptionalSymIntArrayRef|OptionalArrayRef<(c10::)?SymInt>)"
        r"|(at::|c10::)?ArrayRef<(c10::SymInt|int64_t)>"
    ),
    "B": r"std::array<bool, *\d+>|(at::)?ArrayRef<bool>",
    "F": r"(at::)?ArrayRef<(double|float)>",
    "t": r"char *\*|char|std::string|string|c10::string_view|std::string_view",
    "i": r"int64_t|uint64_t|size_t|long",
    "n": r"int|int32_t|uint32_t|aclDataType|(at::|c10::)?ScalarType",
    "c": r"int8_t|uint8_t",
    "b": r"bool",
    "d": r"double",
    "f": r"float",
}
SCHEMA = {"Tensor": "T", "Tensor[]": "L", "Scalar": "S", "Scalar[]": "R", "int": "i", "SymInt": "i", "float": "d", "bool": "b",
          "str": "t", "ScalarType": "n", "int[]": "I", "SymInt[]": "I", "bool[]": "B", "float[]": "F"}  # fmt: skip
# Initializer of an `auto`.
VALUES = {
    "T": (
        r"npu_preparation::apply_tensor|OpPreparation::apply_tensor|at::(empty|zeros|ones)|.*at::Tensor\(\)|.*\.contiguous\(\)$"
    ),
    "n": r".*\.scalar_type\(\)$|npu_preparation::convert_to_acl_data_type",
    "t": r"const_cast<char *\*>",
}
# Arguments that op-plugin passes in another type than CANN's, and why that works.
OTHERS = {
    (f"aclnnFusedInferAttentionScoreV{version}", 23): (
        "actual_shared_prefix_len is an undefined tensor, which is null like no array"
    )
    for version in (4, 5)
}
CALL = re.compile(r"EXEC_NPU(?:_NO_FORMAT_CHECK)?_CMD(?:_V1|_V2)?\(\s*(aclnn\w+)\s*,")


def kind_of_type(name: str) -> str:
    """The C type that op-plugin passes for a C++ type."""
    name = re.sub(r"\bconst\b|[&]", "", name).strip()
    while inner := re.fullmatch(r"(?:c10::|std::|at::)?optional<(.*)>", name):
        name = re.sub(r"\bconst\b|[&]", "", inner[1]).strip()
    return next((kind for kind, pattern in TYPES.items() if re.fullmatch(pattern, name)), "?")


def split(text: str) -> list[str]:
    """Arguments up to the parenthesis that closes the list."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        if depth < 0 or (depth == 0 and sign == ","):
            parts.append(" ".join(text[start:place].split()))
            start = place + 1
        if depth < 0:
            break
    return parts


def kind_of_value(value: str, before: str) -> str:
    """The C type of an argument, from the text of its function up to the call."""
    if value in ("true", "false"):
        return "b"
    if value.endswith(".scalar_type()"):
        return "n"
    if cast := re.match(r"static_cast<([\w:]+)>\(", value):
        return kind_of_type(cast[1])
    if not re.fullmatch(r"\w+", value):
        return next((kind for kind, pattern in VALUES.items() if re.match(pattern, value)), "?")
    declared = re.findall(
        rf"(?:^|[(,;{{]|\bconst\b|\bstatic\b)\s*((?:[\w:]+<[^;={{}}()]*>|[\w:]+)(?:\s*[&*])*)\s*\b{value}\b\s*([,)=;({{])([^;]*)",
        before,
        re.M,
    )
    for name, sign, rest in reversed(declared):
        if name in ("return", "else", "and", "or", "not"):
            continue
        if name.strip("&* ") != "auto":
            return kind_of_type(name)
        first = rest.strip()
        if sign != "=":
            return "?"
        if either := re.match(r"(\w+)\.value_or\(|(\w+)\.value\(\)$", first):
            return kind_of_value(either[1] or either[2], before.rsplit(f"{value} =", 1)[0])
        return kind_of_value(first, before.rsplit(f"{value} =", 1)[0])
    return "?"


def calls_in_sources(directory: Path) -> dict[str, list[str]]:
    """Operator to the argument types of each call in the sources."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in sorted((directory / "ops").rglob("*.cpp")):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(), flags=re.S)
        for call in CALL.finditer(text):
            head = max(
                (
                    match.start()
                    for match in re.finditer(r"^[a-zA-Z][^\n]*\(", text[: call.start()], re.M)
                ),
                default=0,
            )
            before = text[head : call.start()]
            found[call[1]].append(
                "".join(kind_of_value(value, before) for value in split(text[call.end() :]))
            )
    return found


def calls_in_configuration(directory: Path) -> dict[str, list[str]]:
    """Operator to the argument types of each call that op-plugin generates."""
    found: dict[str, list[str]] = defaultdict(list)
    text = (directory / "config" / "op_plugin_functions.yaml").read_text()
    for arguments, results, body in re.findall(
        r"^  - func: [^\s(]+\(([^\n]*)\) -> ([^\n]*)\n(.*?)(?=^  - func|^\w|\Z)", text, re.M | re.S
    ):
        line = re.search(r"^ +exec: (aclnn\w+)(?:, *([^\n]*))?", body, re.M)
        if not line:
            continue
        types = {}
        for argument in split(arguments + ")"):
            if argument != "*":
                kind, name = argument.split("=")[0].rsplit(" ", 1)
                kind = re.sub(r"\(\w[^)]*\)|\?", "", re.sub(r"\[\d+\]", "[]", kind))
                types[name] = SCHEMA.get(kind, "?")
        if line[2]:
            kinds = [types.get(value, "?") for value in split(line[2] + ")")]
        elif "(a!)" in results:  # in place, or into `out`
            kinds = list(types.values())
        else:
            kinds = [*types.values(), *("T" for _ in split(results.strip("() ") + ")"))]
        found[line[1]].append("".join(kinds))
    return found


def table(directory: Path) -> dict[str, list[str]]:
    """Operator to its calls."""
    found = calls_in_sources(directory)
    for operator, calls in calls_in_configuration(directory).items():
        found[operator] += calls
    return dict(sorted(found.items()))


def common(operator: str, calls: list[str]) -> str | None:
    """Argument types that all calls share; None if they have different numbers of arguments."""
    if len({len(call) for call in calls}) > 1:
        return None
    kinds = [set(position) - {"?"} for position in zip(*calls, strict=True)]
    return "".join(
        each.pop() if len(each) == 1 and (operator, place) not in OTHERS else "?"
        for place, each in enumerate(kinds)
    )


def text_of(rows: dict[str, str]) -> str:
    """The rows of the table."""
    return "".join(f'{name.removeprefix("aclnn")} = "{kinds}"\n' for name, kinds in rows.items())


def main() -> None:
    """Parse the command line and write the table or the explanation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op-plugin", type=Path, required=True)
    parser.add_argument("--explain", metavar="OPERATOR")
    arguments = parser.parse_args()
    rows = table(arguments.op_plugin)
    if not rows:
        sys.exit("emulator-arguments: found nothing; is this the right directory?")
    if arguments.explain:
        print("\n".join(rows.get(arguments.explain, [f"no call of {arguments.explain}"])))
        return
    known = {
        operator: kinds
        for operator, calls in rows.items()
        if (kinds := common(operator, calls)) is not None
    }
    TARGET.write_text(HEADER + text_of(known))
    told = sum(kind != "?" for kinds in known.values() for kind in kinds)
    print(
        f"emulator-arguments: {len(known)} of {len(rows)} operators, {told} of"
        f" {sum(map(len, known.values()))} arguments"
    )


if __name__ == "__main__":
    main()
