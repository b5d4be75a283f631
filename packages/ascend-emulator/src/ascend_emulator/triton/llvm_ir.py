# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Changes of a kernel's LLVM IR, as text, after its optimization: the checks of its accesses, its
local memory, and the function by which the emulator calls it."""

from __future__ import annotations

import re

from ascend_emulator.cache import BuildError

ENTRY = "ascend_emulator_triton_entry"
PREFIX = "ascend_emulator_triton_"
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4}
BYTES |= {"double": 8, "ptr": 8, "i128": 16}
DECLARATIONS = """
declare void @ascend_emulator_triton_check(ptr, i64, i32, i32)
declare void @ascend_emulator_triton_copy(i64, ptr, ptr, i32)
declare ptr @ascend_emulator_triton_allocate(i64)
declare void @ascend_emulator_triton_release(ptr)
declare ptr @ascend_emulator_triton_pointer(i64)

define hidden bfloat @__truncsfbf2(float %value) {
  %bits = bitcast float %value to i32
  %odd.wide = lshr i32 %bits, 16
  %odd = and i32 %odd.wide, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %rounded = lshr i32 %sum, 16
  %nan = fcmp uno float %value, 0.0
  %chosen = select i1 %nan, i32 32704, i32 %rounded
  %short = trunc i32 %chosen to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}
"""
"""And the rounding to bfloat16, which the code of processors without it calls."""

_NAME = r'[%@](?:"[^"]+"|[\w.$-]+)'
_DEFINE = re.compile(r"^define (?:[\w-]+ )*?void @(\S+?)\((.*)\)([^()]*)\{$", re.MULTILINE)
_LOCATION = re.compile(
    r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+).*?(?:inlinedAt: (!\d+))?\)$", re.MULTILINE
)
_FOLLOW = re.compile(r"^declare .*(@ascend_emulator_triton_follow_\w+)\(", re.MULTILINE)
_LOAD = re.compile(rf"^  \S+ = load (?:volatile )?(\S.*?), ptr ({_NAME})")
_STORE = re.compile(rf"^  store (?:volatile )?(\S.*?) (?:\S+|<.*>|zeroinitializer), ptr ({_NAME})")
_ATOMIC = re.compile(rf"^  \S+ = (?:atomicrmw \w+|cmpxchg(?: weak)?) ptr ({_NAME}), (\S+)")
_MEMORY = re.compile(r"call void @llvm\.(memcpy|memmove|memset)\.\S+?\((.*)\)")
_ALLOCATION = re.compile(rf"^  ({_NAME}) = (?:alloca |(?:tail )?call .*@malloc\()")
_STEP = re.compile(rf"^  ({_NAME}) = getelementptr (?:inbounds |nuw |nusw )*.*?, ptr ({_NAME})")


def _size(type_: str) -> int:
    """Bytes of a type that an access has."""
    if vector := re.fullmatch(r"<(\d+) x (\w+)>", type_):
        return -(-int(vector[1]) * (1 if vector[2] == "i1" else BYTES[vector[2]] * 8) // 8)
    if whole := re.fullmatch(r"i(\d+)", type_):
        return -(-int(whole[1]) // 8)
    if type_ not in BYTES:
        raise BuildError(f"the emulator's Triton driver does not know the size of {type_}")
    return BYTES[type_]


def _locals(lines: list[str]) -> set[str]:
    """Pointers into local memory, by an allocation and steps from it."""
    known: set[str] = set()
    steps = []
    for line in lines:
        if allocation := _ALLOCATION.match(line):
            known.add(allocation[1])
        elif step := _STEP.match(line):
            steps.append((step[1], step[2]))
    before = -1
    while before != len(known):
        before = len(known)
        known |= {to for to, origin in steps if origin in known or origin[0] == "@"}
    return known


def _arguments(text: str) -> list[str]:
    """The operands of a call: the last word of each, attributes left out."""
    return [each.split()[-1] for each in re.split(r", (?![^(]*\))", text)]


def _accesses(line: str) -> list[tuple[str, str, int]]:
    """Pointer, bytes and whether it writes, of the accesses of a line, but not to constants."""
    if ", ptr getelementptr" in line:
        return []
    if load := _LOAD.match(line):
        return [(load[2], str(_size(load[1])), 0)]
    if store := _STORE.match(line):
        return [(store[2], str(_size(store[1])), 1)]
    if atomic := _ATOMIC.match(line):
        return [(atomic[1], str(_size(atomic[2].rstrip(","))), 1)]
    if memory := _MEMORY.search(line):
        operands = _arguments(memory[2])
        written = [(operands[0], operands[2], 1)]
        return written if memory[1] == "memset" else [(operands[1], operands[2], 0), *written]
    if re.match(r"^  (?:\S+ = )?(?:load|store|atomicrmw|cmpxchg) ", line):
        raise BuildError(
            f"the emulator's Triton driver cannot check this access of a kernel: {line.strip()}"
        )
    return []


def _checked(lines: list[str], lines_of: dict[str, str]) -> list[str]:
    """The lines of a function, with a call before each access that is not of local memory."""
    local, result = _locals(lines), []
    for line in lines:
        at = re.search(r"!dbg (!\d+)", line)
        number, end = (lines_of.get(at[1], "0"), f", !dbg {at[1]}") if at else ("0", "")
        for pointer, bytes_, writes in _accesses(line):
            if pointer not in local and pointer[0] == "%":
                call = f"@{PREFIX}check(ptr {pointer}, i64 {bytes_}, i32 {number}, i32 {writes})"
                result.append(f"  call void {call}{end}")
        line = re.sub(r"@memrefCopy\((.*)\)", rf"@{PREFIX}copy(\1, i32 {number})", line)
        line = line.replace("@malloc(", f"@{PREFIX}allocate(").replace(
            "@free(", f"@{PREFIX}release("
        )
        result.append(line)
    return result


def _lines(text: str) -> dict[str, str]:
    """Line of the kernel's file by location: that of the call where a function is inlined."""
    found = {name: (line, caller) for name, line, caller in _LOCATION.findall(text)}

    def outermost(name: str) -> str:
        line, caller = found[name]
        return outermost(caller) if caller in found else line

    return {name: outermost(name) for name in found}


def _follow(function: str) -> str:
    """A function that makes a memref of an address that the kernel read from memory."""
    type_ = "{ ptr, ptr, i64, [1 x i64], [1 x i64] }"
    values = ("ptr %at", "ptr %at", "i64 0", f"i64 {1 << 40}", "i64 1")
    places = ("0", "1", "2", "3, 0", "4, 0")
    lines = [f"define internal {type_} {function}(i64 %address) {{"]
    lines.append(f"  %at = call ptr @{PREFIX}pointer(i64 %address)")
    for number, (value, place) in enumerate(zip(values, places, strict=True)):
        whole = f"%value.{number - 1}" if number else "poison"
        lines.append(f"  %value.{number} = insertvalue {type_} {whole}, {value}, {place}")
    return "\n".join([*lines, f"  ret {type_} %value.{number}", "}"])


def _entry(kernel: str, types: list[str]) -> str:
    """A function that takes the arguments of the kernel from an array of 64-bit numbers."""
    lines = [f"define void @{ENTRY}(ptr %slots) {{"]
    for number, type_ in enumerate(types):
        lines.append(f"  %at.{number} = getelementptr i64, ptr %slots, i64 {number}")
        lines.append(f"  %value.{number} = load {type_}, ptr %at.{number}")
    values = ", ".join(f"{type_} %value.{number}" for number, type_ in enumerate(types))
    return "\n".join([*lines, f"  call void @{kernel}({values})", "  ret void", "}"])


def with_checks(text: str) -> str:
    """The module of a kernel as the emulator runs it.

    Raises:
        BuildError: an access has a form that cannot be checked.
    """
    kernel = _DEFINE.search(text)
    if not kernel:
        raise BuildError("the emulator's Triton driver found no kernel in the compiled module")
    lines_of = _lines(text)
    result: list[str] = []
    body: list[str] | None = None
    for line in text.splitlines():
        if body is not None and line == "}":
            result += [*_checked(body, lines_of), line]
            body = None
        elif body is not None:
            body.append(line)
        else:
            if line.startswith("define "):
                body = []
            if not re.match(
                r"declare .*@(?:malloc|free|memrefCopy|ascend_emulator_triton_follow_\w+)\(", line
            ):
                result.append(line)
    followed = [_follow(name) for name in _FOLLOW.findall(text)]
    types = [each.split()[0] for each in kernel[2].split(", ")]
    return "\n".join([*result, DECLARATIONS, *followed, _entry(kernel[1], types), ""])
