# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Limits that torch_npu documents for operators of the wheels, compared with the emulator's rules.

The documentation is torch_npu/_op_plugin_docs.py of the installed wheel. A sentence, or a part of
one, that names a limit (LIMIT) is in the tables if a rule quotes it, or if a table gives the reason
why it is no rule.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import environment
from generated_docs.markdown import table

PROJECTS = Path(__file__).with_name("callers.toml")
CALL = re.compile(r"\btorch_npu\.(npu_\w+)|\btorch\.ops\.npu\.(npu_\w+)")
# Words that name a limit.
LIMIT = re.compile(
    r"不支持|[仅只](?:当前)?支持|[仅只]能|当前只|取值|范围|倍数|整除|≤|<=|≥|>=|[<>]\s*\d|不超过|不大于|不小于|小于|大于"
    r"|不能|必须|[须需]要?[为与和是]|要求|数据类型(?:支持|为)|一致|相等|相同|[一二三四五六1-8](?:-[1-8])?[维D]"
)
# Sections of a page; what follows END is about versions and examples.
END = re.compile(
    r"^(?:支持的PyTorch版本|支持的型号|调用示例|示例|Examples?|代码示例)", re.MULTILINE
)
SKIPPED = re.compile(
    r"^(?:输出说明|返回值|功能(?:描述|说明)|计算公式|接口原型|函数原型|torch_npu\.)"
)
TAKEN = re.compile(r"^(?:参数说明|约束说明|参数|约束)")
PARAMETER = re.compile(r"^-?\s*([a-z][\w\\]*)\s*[:：(（]", re.ASCII)
SENTENCE = re.compile(r"[。；;]|\.(?=\s|$)")
CONDITION = re.compile(r"^(?:当|若|如果|进行|其他|使用|[^,，]*(?:时|场景下?|情况下?)[,，])")
PART = re.compile(r"[,，](?![^(（\[]*[)）\]])")


@cache
def called() -> tuple[str, ...]:
    """Functions of torch_npu that the wheels call, and that its documentation has."""
    sources = (environment.ROOT / "packages").glob("*/src/**/*.py")
    names = {name for path in sources for match in CALL.findall(path.read_text()) for name in match}
    return tuple(sorted(names & pages().keys()))


@cache
def pages() -> dict[str, str]:
    """Documentation of each function of the installed torch_npu.

    Raises:
        LookupError: torch_npu is not installed.
    """
    from ascend_emulator import cann_names

    directory = cann_names.package_dir("torch_npu")
    if directory is None:
        raise LookupError("torch_npu is not installed")
    texts = {}
    for node in ast.walk(ast.parse((directory / "_op_plugin_docs.py").read_text())):
        match node:
            case ast.Call(args=[ast.Constant(str(name)), ast.Constant(str(text))]):
                texts[name] = text
    return texts


def limits(function: str) -> list[str]:
    """Limits in a function's documentation, each with the parameter under which it stands."""
    text = END.split(pages().get(function, ""))[0]
    documented, taken, parameter = [], not TAKEN.search(text), ""
    for line in text.splitlines():
        if SKIPPED.match(line) or TAKEN.match(line):
            taken, parameter = bool(TAKEN.match(line)), ""
        elif match := PARAMETER.match(line):
            parameter, line = f"{match[1]}: ", line[match.end() :]
        if not taken:
            continue
        for sentence in SENTENCE.split(line):
            parts = [sentence] if CONDITION.match(sentence) else PART.split(sentence)
            documented += [
                parameter + " ".join(part.split()) for part in parts if LIMIT.search(part)
            ]
    return list(dict.fromkeys(documented))


def state(function: str) -> dict[str, str]:
    """Each documented limit: the id of its rule, `unchecked`, or nothing."""
    from ascend_emulator import rules

    mine = [each for each in rules.descriptions() if function in each.functions]
    states = {limit: "unchecked" for each in mine for limit in each.unchecked}
    states |= {limit: rule.id for each in mine for rule in each.rules for limit in rule.says}
    other = "unchecked" if function in not_emulated() else ""
    return {limit: states.get(limit, other) for limit in limits(function)}


def not_emulated() -> dict[str, list[str]]:
    """Functions that the emulator refuses, with the operators that it does not have."""
    return tomllib.loads(PROJECTS.read_text())["not_emulated"]


def unknown() -> list[str]:
    """Limits that the tables quote and that no page of their functions has."""
    from ascend_emulator import rules

    missing = []
    for each in rules.descriptions():
        documented = {limit for function in each.functions for limit in limits(function)}
        own = [rule for rule in each.rules if rule.source == rules.DOCUMENT]
        quotes = [(rule.id, limit) for rule in own for limit in rule.says]
        quotes += [(each.name, limit) for limit in each.unchecked]
        missing += [f"{name}: {limit}" for name, limit in quotes if limit not in documented]
    return missing


def counts(functions: Iterable[str]) -> str:
    """By function: documented limits, those with a rule, those that are no rules, the rest."""
    rows = []
    for function in functions:
        states = list(state(function).values())
        without = states.count("")
        checked = sum(each not in ("", "unchecked") for each in states)
        numbers = [len(states), checked, states.count("unchecked"), without]
        rows.append([f"`{function}`", *map(str, numbers)])
    total = [str(sum(int(row[i]) for row in rows)) for i in range(1, 5)]
    header = ["function", "limits in its documentation", "rule", "reason why not", "neither yet"]
    return table(header, [*rows, ["all", *total]])


def counts_of_wheels() -> str:
    """Of the functions that the wheels call."""
    return counts(called())


def counts_of_projects() -> str:
    """Of the functions that other projects call and the wheels do not, and their share in all."""
    projects = tomllib.loads(PROJECTS.read_text())["projects"]
    theirs = {function for each in projects for function in each["functions"]}
    documented = sorted(theirs & pages().keys())
    states = [each for function in documented for each in state(function).values()]
    share = 100 * sum(map(bool, states)) / len(states)
    names = [f"{each['name']} `{each['commit']}` ({each['date']})" for each in projects]
    without = ", ".join(f"`{function}`" for function in sorted(theirs - pages().keys()))
    return (
        f"Of {' and '.join(names)}: {len(states)} limits of {len(documented)} functions, of which"
        f" {share:.1f} % have a rule or a reason. The table lists functions that the wheels do not"
        f" call. torch_npu documents no limits of {without}.\n\n"
        + counts(each for each in documented if each not in called())
    )
