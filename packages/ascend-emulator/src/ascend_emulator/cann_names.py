# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's names: those that the installed torch_npu looks up, those that are public, and stubs that
fail with their name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from functools import cache
from pathlib import Path

from ascend_emulator import elf, facts
from ascend_emulator.cache import BuildError

NAMES = Path(__file__).with_name("cann_names.txt")
# Beginnings of the names in libtorch_npu.so.
WHEEL_NAMES = (
    rb"acl(?:nn|rt|mdl|op|sys|prof)?[A-Z]",
    rb"Hccl[A-Z]",
    rb"rt[A-Z]\w{5}",
    rb"Msprof[A-Z]",
)
# Prefixes of operators: GetWorkspaceSize and the launch.
OPERATORS = ("aclnn", "Atb", "aclStft", "aclRfft1D")
# Releases of torch_npu for whose ATB parameters csrc/ops/atb has the layout: op-plugin's
# declarations of them are the same, up to new enumerators, in its releases 7.1.0 to 26.1.0. A build
# of one's own may have others.
ATB_LAYOUT = ("2.10", "2.11", "2.12", "2.13", "2.14")
# Optional calls: torch_npu works without them, as with an older CANN.
ABSENT = frozenset[str]()
# Calls that return a pointer or a bit set instead of a status, beside those in headers: they return
# 0 when they refuse.
NO_STATUS = frozenset(
    {
        "HcclGetCommConfigCapability",
        "aclCreateGraphDumpOpt",
        "aclprofCreateConfig",
        "aclprofCreateStepInfo",
    }
)


def package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(
            f"ascend-emulator needs {name}, which is not installed: pip install torch==2.13.0"
            " torch-npu==2.13.0"
        )
    return Path(spec.origin).parent


@cache
def wheel_names() -> list[str]:
    """All CANN names that the installed torch_npu links against or looks up (its string table)."""
    data = (package_dir("torch_npu") / "lib" / "libtorch_npu.so").read_bytes()
    # Each expression begins with a literal, for which re searches twenty times faster than for
    # (?<!\w) and alternatives.
    names = {
        found[0][:-1].decode()
        for begin in WHEEL_NAMES
        for found in re.finditer(rb"%b\w+\0" % begin, data)
        if not re.match(rb"\w", data[found.start() - 1 : found.start()])
    }
    # Nine letters ending in a capital are eight of an inlined string and the first byte of an
    # instruction ("HcclAllgH").
    names |= {
        name.decode()
        for name in re.findall(rb"\0(Atb[A-Z]\w+?)(?:GetWorkspaceSize)?(?=\0)", _atb_plugin())
    }
    return sorted(
        n for n in names if not (len(n) == 9 and (n[-1].isupper() or n.startswith("Hccl")))
    )


@cache
def public_names() -> dict[str, bool]:
    """CANN's public C functions: name to whether it returns a status. From cann_names.txt, the
    operators of facts/arguments.toml and the torch_npu wheel's headers."""
    lines = (line.split() for line in NAMES.read_text().splitlines())
    functions = {name: not rest for name, *rest in lines}
    functions |= dict.fromkeys(facts.arguments(), True)
    headers = package_dir("torch_npu") / "include" / "third_party"
    for path in sorted([*headers.glob("acl/inc/acl/**/*.h"), *headers.glob("hccl/inc/hccl/*.h")]):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(errors="replace"), flags=re.DOTALL)
        for kind, name in re.findall(
            r"(?:ACL_FUNC_VISIBILITY|extern)\s+([\w\s*]+?)\s*\b((?:acl|Hccl)\w+)\s*\(", text
        ):
            functions[name] = kind.split()[-1] in ("aclError", "HcclResult")
    return functions


def _atb_plugin() -> bytes:
    return (package_dir("torch_npu") / "lib" / "libop_plugin_atb.so").read_bytes()


@cache
def atb_operators() -> list[str]:
    """Operators that torch_npu creates by libatb.so's C++ functions: ``atb::PagedAttention`` and
    others."""
    operations = re.findall(
        rb"\0_ZN3atb15CreateOperationINS_5infer\d+(\w+?)ParamEEEi", _atb_plugin()
    )
    return sorted({f"atb::{name.decode()}" for name in operations})


@cache
def graph_engine_names() -> list[str]:
    """C++ functions of CANN's graph engine that torchair, in torch_npu's wheel, is linked
    against."""
    return elf.missing((package_dir("torch_npu") / "dynamo/torchair/core").glob("*.so"), "_ZNK?2ge")


def has_two_functions(name: str) -> bool:
    """Whether a name belongs to an operator, with GetWorkspaceSize and the launch."""
    others = ("aclnnInit", "aclnnFinalize", "aclnnSetPytorchRandom")
    return name.startswith(OPERATORS) and name not in others


def atb_without_layout() -> list[str]:
    """ATB's operators if their parameters' layout is not known for the installed torch_npu."""
    release = re.fullmatch(
        r"(\d+\.\d+)\.\d+(rc\d+)?(\.post\d+)?", importlib.metadata.version("torch-npu")
    )
    if release and release[1] in ATB_LAYOUT:
        return []
    return [
        *atb_operators(),
        *sorted({operator(name) for name in wheel_names() if name.startswith("Atb")}),
    ]


def operator(name: str) -> str:
    """The operator of an aclnn or Atb symbol; other names are returned unchanged."""
    return re.sub(r"Get(Max)?WorkspaceSize$", "", name) if name.startswith(OPERATORS) else name


def stubs(names: list[str]) -> str:
    """C++ source of weak functions that fail with their name; definitions elsewhere
    override them."""
    lines = [
        '#include "core/refusal.h"',
        "#define STUB(NAME) EXPORT __attribute__((weak)) int NAME() { return emu::refuse(#NAME); }",
    ]
    # GetWorkspaceSize fails with the operator's name.
    workspace = (
        "EXPORT __attribute__((weak)) int NAME##GetWorkspaceSize() { return emu::refuse(#NAME); }"
    )
    lines.append(f"#define OPERATOR(NAME) STUB(NAME) {workspace}")
    lines += [
        f'EXPORT __attribute__((weak)) int {n}() {{ return emu::refuse("{n}"); }}'
        for n in names
        if n.endswith("GetMaxWorkspaceSize")
    ]
    public = public_names()
    operators = {operator(n) for n in (*names, *public) if has_two_functions(n)}
    lines += [f"OPERATOR({name})" for name in sorted(operators)]
    lines.append(
        "#define VALUE(NAME) EXPORT __attribute__((weak)) long NAME() { return"
        " emu::refuse_value(#NAME); }"
    )
    others = {n: n not in NO_STATUS for n in names} | public
    others = {n: status for n, status in others.items() if not has_two_functions(n)}
    lines += [
        f"{'STUB' if status else 'VALUE'}({name})"
        for name, status in sorted(others.items())
        if name not in ABSENT
    ]
    # C++ functions throw: of what they return nothing is known but the name.
    lines.append(
        "#define ENGINE(SYMBOL, NAME) EXPORT __attribute__((weak)) void SYMBOL() {"
        " emu::refuse_engine(NAME); }"
    )
    lines += [f'ENGINE({symbol}, "{elf.readable(symbol)}")' for symbol in graph_engine_names()]
    return "\n".join(lines) + "\n"
