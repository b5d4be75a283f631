# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The formats of eight and four bits in C++ (csrc/ops/quantization/formats.h), all codes and all
values of 16 bits, against tables from the standards and PyTorch's casts."""

import ctypes
import subprocess

import narrow_formats as formats
import pytest
import torch
from ascend_emulator import build

# In the order of formats.h.
KINDS = ["e4m3", "e5m2", "e2m1", "e1m2", "hif8", "e8m0"]
MODES = ["rint", "floor", "round"]
SOURCE = """
#include "ops/quantization/formats.h"
using namespace emu::formats;
extern "C" float value(int encoding, int code) {
  return Format::of(static_cast<Encoding>(encoding)).value(static_cast<uint8_t>(code));
}
extern "C" void codes(int encoding, int rounding, int saturate, const double* from, uint8_t* to, long n) {
  const auto& format = Format::of(static_cast<Encoding>(encoding));
  for (long i = 0; i < n; ++i)
    to[i] = format.code(from[i], static_cast<Rounding>(rounding), saturate);
}
extern "C" int scale(int encoding, int rule, double largest, double most) {
  return scale_code(largest, Format::of(static_cast<Encoding>(encoding)), static_cast<ScaleRule>(rule), most);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    (directory / "formats.cpp").write_text(SOURCE)
    compiler, _ = build.cxx()
    command = [*compiler, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{build.SOURCES}", "-o", "formats.so", "formats.cpp"]
    subprocess.run(command, cwd=directory, check=True)
    library = ctypes.CDLL(str(directory / "formats.so"))
    library.value.restype = ctypes.c_float
    return library


def codes(library, values, kind, mode="rint", saturate=True):
    values = values.double().contiguous()
    out = torch.empty(values.shape, dtype=torch.uint8)
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (values, out))
    arguments = (KINDS.index(kind), MODES.index(mode), int(saturate))
    library.codes(*arguments, *pointers, ctypes.c_long(values.numel()))
    return out


def all_of(dtype):
    """Each value of a 16-bit dtype, without NaN."""
    values = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    return values[~values.isnan()]


@pytest.mark.parametrize("kind", KINDS)
def test_each_code_has_the_value_of_the_standard(library, kind):
    known = formats.table(kind)
    assert len(known) == (16 if kind in ("e2m1", "e1m2") else 256)
    actual = [library.value(KINDS.index(kind), code) for code in range(len(known))]
    expected = [known[code] for code in range(len(known))]
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), atol=0, rtol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_float8_is_rounded_as_by_pytorch(library, kind, dtype):
    """Without saturation, and with it as by a cast of clamped values. Without it e4m3 has NaN for
    values that round above 448, which the specification wants and a cast saturates."""
    to = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    values, largest = all_of(dtype), torch.finfo(to).max
    expected = values.float().to(to).view(torch.uint8)
    if kind == "e4m3":
        above = values.float().abs() > 464
        expected[above] = 0x7F + 128 * values[above].signbit().byte()
    torch.testing.assert_close(codes(library, values, kind, saturate=False), expected)
    clamped = values.float().clamp(-largest, largest).to(to)
    torch.testing.assert_close(codes(library, values, kind), clamped.view(torch.uint8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1", "e1m2", "hif8"])
def test_each_value_of_16_bits_is_rounded_as_in_float64(library, kind, dtype, mode):
    values = all_of(dtype)
    actual = formats.table(kind)
    of_codes = torch.tensor([actual[code] for code in range(len(actual))]).double()
    result = of_codes[codes(library, values, kind, mode).long()]
    expected = formats.rounded(values, kind, mode)
    torch.testing.assert_close(result, expected, atol=0, rtol=0)
    if kind != "hif8":  # which has one zero
        assert torch.equal(result.signbit(), expected.signbit())


def test_hif8_overflows_at_five_quarters_of_its_largest_value(library):
    below = torch.tensor([40959.0, -40959.0, 40960.0, -40960.0, float("inf")])
    assert codes(library, below, "hif8", saturate=False).tolist() == [0x6E, 0xEE, 0x6F, 0xEF, 0x6F]
    assert codes(library, below, "hif8").tolist() == [0x6E, 0xEE, 0x6E, 0xEE, 0x6E]


@pytest.mark.parametrize("saturate", [False, True])
def test_nan_stays_nan_where_the_format_has_it(library, saturate):
    values = torch.tensor([float("nan")])
    stored = {kind: codes(library, values, kind, saturate=saturate).item() for kind in KINDS[:5]}
    assert stored == {"e4m3": 0x7F, "e5m2": 0x7F, "hif8": 0x80, "e2m1": 0, "e1m2": 0}


@pytest.mark.parametrize(
    ("kind", "rule", "largest", "code"),
    [
        ("e4m3", 0, 448.0, 127),
        ("e4m3", 0, 511.0, 127),  # above the largest value, which saturates
        ("e4m3", 0, 512.0, 128),
        ("e4m3", 1, 448.0, 127),
        ("e4m3", 1, 449.0, 128),
        ("e5m2", 0, 2.0**15, 127),
        ("e2m1", 0, 7.0, 127),
        ("e2m1", 2, 6.0, 127),
        ("e2m1", 2, 6.5, 128),
        ("e1m2", 0, 1.75, 127),
        ("e4m3", 0, 0.0, 0),
        ("e4m3", 1, 0.0, 0),
        ("e4m3", 0, 2.0**-133, 0),  # below the least exponent
        ("e4m3", 1, 2.0**-126 * 448, 1),
        ("e4m3", 1, 2.0**-127 * 448, 0),
        ("e4m3", 1, 2.0**-127 * 480, 1),
        ("e2m1", 0, 2.0**127, 252),
        ("e4m3", 0, float("inf"), 255),
        ("e4m3", 1, float("nan"), 255),
    ],
)
def test_shared_exponent(library, kind, rule, largest, code):
    stored = library.scale(KINDS.index(kind), rule, ctypes.c_double(largest), ctypes.c_double(0))
    assert stored == code


@pytest.mark.parametrize(
    ("bound", "largest", "code"),
    [(6.0, 6.0, 127), (7.0, 6.5, 127), (7.0, 7.5, 128), (12.0, 12.0, 127), (8.0, 6.5, 127)],
)
def test_shared_exponent_by_another_largest_value(library, bound, largest, code):
    kind = KINDS.index("e2m1")
    assert library.scale(kind, 2, ctypes.c_double(largest), ctypes.c_double(bound)) == code
