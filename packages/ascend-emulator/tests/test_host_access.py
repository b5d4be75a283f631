# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Accesses of the host that are mistakes: to device memory, and to pinned memory before its copy."""

import re
import signal
import sys

import pytest

# Python exports the functions that write its stack in some versions only.
SITES = sys.version_info[:2] in ((3, 11), (3, 12))
# CANN's functions without torch, whose import takes seconds.
START = """
import ctypes, os, sys
import ascend_emulator
from ctypes import byref, c_size_t, c_void_p, memset, string_at
ascend_emulator.activate(memory=256 << 20)
acl = ctypes.CDLL("libascendcl.so")
def new(function, *arguments):
    result = c_void_p()
    assert function(byref(result), *arguments) == 0
    return result
acl.aclInit(None)
acl.aclrtSetDevice(0)
N = 1 << 20
npu = new(acl.aclrtMalloc, c_size_t(N), 0)
acl.aclrtMemset(npu, c_size_t(N), 7, c_size_t(N))
stream = new(acl.aclrtCreateStream)
TO, FROM = 1, 2
def copy(kind, host, bytes, at=0):
    ends = (npu, host) if kind == TO else (host, npu)
    target, source = (c_void_p(each.value + at) for each in ends)
    n = c_size_t(bytes)
    assert acl.aclrtMemcpyAsync(target, n, source, n, kind, stream) == 0
def pinned(bytes=N):
    return new(acl.aclrtMallocHost, c_size_t(bytes))
def wait():
    assert acl.aclrtSynchronizeStream(stream) == 0
"""


@pytest.fixture
def program(run, tmp_path):
    """``program(text, *options, **environment)``: a file with this text, after START."""
    path = tmp_path / "program.py"

    def start(text, *options, **environment):
        path.write_text(START + text)
        return run("run", *options, "--", sys.executable, str(path), **environment)

    return start


def line_of(text, part):
    """Number of the line in the program that has this part."""
    return next(n for n, line in enumerate((START + text).splitlines(), 1) if part in line)


def device_lines(done):
    assert done.returncode == -signal.SIGSEGV, done.stderr
    return [line for line in done.stderr.splitlines() if "NPU memory" in line]


@pytest.mark.parametrize(
    ("access", "verb", "handler"),
    [
        ("string_at(npu.value + 64, 4)", "reads", ""),
        ("memset(npu.value + 64, 1, 4)", "writes", "1"),
    ],
)
def test_device_memory_is_named_before_the_process_ends(program, access, verb, handler):
    """With Python's handler of the signal too, which still prints its traceback."""
    done = program(access, PYTHONFAULTHANDLER=handler)
    (line,) = device_lines(done)
    site = rf" at \S*program\.py:{line_of(access, access)} \(<module>\)" if SITES else ""
    assert re.fullmatch(
        rf"ascend-emulator: the host {verb} NPU memory{site}: address 0x[0-9a-f]+, byte 64 of an"
        r" allocation of 1048576 bytes of NPU 0; fix: copy it with tensor.cpu\(\) or copy_\(\), or"
        r" aclrtMemcpy",
        line,
    ), line
    assert done.stderr.count("Fatal Python error: Segmentation fault") == len(handler)


def test_where_nothing_is_allocated_with_a_later_handler(program):
    """It is called too, once: its way to end the process is to send the signal again."""
    later = "import faulthandler; faulthandler.enable(); acl.aclrtFree(npu)\n"
    later += "new(acl.aclrtMalloc, c_size_t(N >> 1), 0)\n"
    done = program(f"{later}string_at(npu.value + (9 << 20), 4)")
    assert ", where nothing is allocated; fix: " in device_lines(done)[0]
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1


@pytest.mark.parametrize(
    ("handler", "ending"),
    [(False, "string_at(8, 4)"), (True, "string_at(8, 4)"), (True, "os.kill(os.getpid(), 11)")],
)
def test_other_faults_end_as_before(program, handler, ending):
    enable = "import faulthandler; faulthandler.enable()\n" if handler else ""
    done = program(f"{enable}copy(FROM, pinned(), N)\n{ending}\n", "--strict")
    assert device_lines(done) == []
    assert done.stderr.count("Fatal Python error: Segmentation fault") == handler


RACES = """
def read():
    host = pinned()
    copy(FROM, host, N)  # is read
    return string_at(host.value + N - 1, 1)

def read_late():
    host = pinned()
    copy(FROM, host, N)
    wait()
    return string_at(host.value + N - 1, 1)

def write():
    host = pinned()
    memset(host, 1, N)
    copy(TO, host, N)
    before = string_at(host, 1)  # the copy reads it too
    memset(host.value + 20, 2, 1)
    wait()
    copy(FROM, host, N)
    wait()
    return before + string_at(host.value + 20, 1)

def write_late():
    host = pinned()
    copy(TO, host, N)
    wait()
    memset(host, 2, N)
    return string_at(host, 1)

def neighbours():
    host = pinned(12288)
    copy(FROM, host, 2048)
    copy(FROM, c_void_p(host.value + 6144), 6144)
    memset(host.value + 2048, 3, 1)  # the rest of the first copy's page
    first = string_at(host.value + 2048, 1)
    last = string_at(host.value + 12287, 1)  # raced
    wait()
    return first + last + string_at(host, 1) + string_at(host.value + 12287, 1)

def file():
    host = pinned(8192)
    copy(FROM, c_void_p(host.value + 4096), 4096)
    with open(__file__, "rb") as opened:
        place = (ctypes.c_char * 4096).from_address(host.value)
        return str(os.readv(opened.fileno(), [place]) > 0).encode()

def freed():
    for size in (100, 5000, N) * 20:
        host = pinned(size)
        copy(FROM, host, size)
        if size == 5000:
            wait()
        elif size == N:
            assert acl.aclrtDeviceTaskAbort(0, 0) == 0
        assert acl.aclrtFreeHost(host) == 0
        if size == 100:
            assert acl.aclrtDeviceTaskAbort(0, 0) == 0
    host = pinned()
    memset(host, 5, N)
    return string_at(host.value + N - 1, 1)

def replayed():
    host = pinned(4096)
    memset(host, 1, 4096)
    assert acl.aclmdlRICaptureBegin(stream, 0) == 0
    copy(FROM, host, 4096)
    graph = c_void_p()
    assert acl.aclmdlRICaptureEnd(stream, byref(graph)) == 0
    values = string_at(host, 1)
    acl.aclrtMemset(npu, c_size_t(N), 6, c_size_t(N))
    assert acl.aclmdlRIExecuteAsync(graph, stream) == 0
    values += string_at(host, 1)  # replay
    wait()
    values += string_at(host, 1)
    assert acl.aclmdlRIExecuteAsync(graph, stream) == 0
    wait()
    return values + string_at(host, 1)

def forked():
    host = pinned()
    copy(FROM, host, N)
    if not (child := os.fork()):
        os._exit(string_at(host, 1)[0])
    status = os.waitpid(child, 0)[1]
    wait()
    return bytes([status]) + string_at(host, 1)

for function in (read, read_late, write, write_late, neighbours, file, freed, replayed, forked):
    acl.aclrtMemset(npu, c_size_t(N), 7, c_size_t(N))
    print(function.__name__, list(function()), flush=True)
    print(function.__name__, "ended", file=sys.stderr, flush=True)
"""
RACE = r"ascend-emulator: race at "


@pytest.fixture(scope="module")
def races(run, tmp_path_factory):
    """Of the functions in RACES what they return and what is said meanwhile, and the last line."""
    path = tmp_path_factory.mktemp("races") / "program.py"
    path.write_text(START + RACES)
    done = run("run", "--strict", "--", sys.executable, str(path))
    assert done.returncode == 0, done.stderr
    values = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    messages, lines = {}, []
    for line in done.stderr.splitlines():
        name, _, ended = line.partition(" ")
        if ended == "ended":
            messages[name], lines = lines, []
        elif line.startswith(RACE):
            lines.append(line.replace(str(path), "program.py"))
    return values, messages, done.stderr.splitlines()[-1].replace(str(path), "program.py")


def said_at(part, function, rest):
    """A line about a race, at the program's line that has this part."""
    site = (
        f"program.py:{line_of(RACES, part)} ({function})" if SITES else "a line outside of Python"
    )
    at = f", called at program.py:{line_of(RACES, 'acl.aclrtMemcpyAsync')} (copy)," if SITES else ""
    return f"{RACE}{site}: the host {rest.replace(' @', at)}; fix: wait for the copy first, by its stream or an event"


def test_a_read_before_the_copy_arrived(races):
    values, message, _ = races
    wanted = (
        "read byte 1048575 of pinned memory before a copy of 1048576 bytes from NPU 0 @ had arrived"
    )
    assert message["read"] == [said_at("return string_at(host.value + N - 1, 1)", "read", wanted)]
    assert values["read"] == "[0]"


def test_a_write_before_the_copy_has_read(races):
    values, message, _ = races
    wanted = "wrote byte 20 of pinned memory before a copy of 1048576 bytes to NPU 0 @ had read it"
    assert message["write"] == [said_at("memset(host.value + 20, 2, 1)", "write", wanted)]
    assert values["write"] == "[1, 2]"  # The NPU got what it should not.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_late", "[7]"),
        ("write_late", "[2]"),
        ("file", "[84, 114, 117, 101]"),  # Of a system call into a page of its own.
        ("freed", "[5]"),
        ("forked", "[0, 7]"),
    ],
)
def test_accesses_that_are_no_race(races, name, value):
    values, message, _ = races
    assert (values[name], message[name]) == (value, [])


def test_neighbours_of_a_copy_are_no_race(races):
    """Of a page whose other part a copy writes; the race behind it is found in another page."""
    values, message, _ = races
    wanted = "read byte 6143 of pinned memory before a copy of 6144 bytes from NPU 0 @ had arrived"
    assert message["neighbours"] == [said_at("# raced", "neighbours", wanted)]
    assert values["neighbours"] == "[3, 0, 7, 7]"


def test_copies_of_a_replayed_graph(races):
    values, message, _ = races
    (line,) = message["replayed"]
    assert "read byte 0 of pinned memory before a copy of 4096 bytes from NPU 0" in line
    assert not SITES or f"program.py:{line_of(RACES, '# replay')} (replayed)" in line
    assert values["replayed"] == "[1, 1, 6, 6]"


def test_the_end_counts_them(races):
    last = races[2]
    assert last.startswith("ascend-emulator: races: ")
    assert len(
        re.findall(r"\d+ at program\.py:\d+ \((?:read|write|neighbours|replayed)\)", last)
    ) == (4 if SITES else 0)


TORCH = """
import torch, torch_npu
x = torch.ones(1 << 20).npu()
torch.npu.synchronize()
host = torch.empty(1 << 20, pin_memory=True)
host.copy_(x, non_blocking=True)
print(host.sum().item())
torch.npu.current_stream().synchronize()
print(host.sum().item())
"""


@pytest.mark.parametrize("message", [True, False])
def test_torch_with_several_threads(run, tmp_path, message):
    """Threads of OpenMP read, which have no line of Python; that of the main thread is named."""
    (tmp_path / "program.py").write_text(TORCH)
    switched = {} if message else {"ASCEND_EMULATOR_RACES": "0"}
    command = (sys.executable, str(tmp_path / "program.py"))
    done = run(
        "run",
        "--strict",
        "--",
        *command,
        OMP_NUM_THREADS="2",
        **switched | {"TASK_QUEUE_ENABLE": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "1048576.0"
    lines = [line for line in done.stderr.splitlines() if line.startswith(RACE)]
    assert len(lines) == message
    assert not message or not SITES or "program.py:7 (<module>): the host read byte " in lines[0]
