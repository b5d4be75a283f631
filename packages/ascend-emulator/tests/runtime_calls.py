# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's calls for streams, graphs and memory, which raise the emulator's error."""

import ctypes

from memory_calls import acl, message

WITHIN_NPU = 3  # aclrtMemcpyKind


class ConditionalTask(ctypes.Structure):
    """Parameters of aclmdlRIAddCondTask, which writes the branches' graphs."""

    _fields_ = [
        ("handle", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("size", ctypes.c_uint32),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
    ]


def call(name, *arguments):
    if status := getattr(acl, name)(*arguments):
        raise RuntimeError(f"{status}: {message()}")


def new(name, *arguments):
    """The value that the call writes to its first parameter."""
    out = ctypes.c_void_p()
    call(name, ctypes.byref(out), *arguments)
    return out


def stream():
    return new("aclrtCreateStream")


def memory(size=4096):
    return new("aclrtMalloc", ctypes.c_size_t(size), 0)


def begin(on, mode=2):
    call("aclmdlRICaptureBegin", on, mode)


def end(on):
    graph = ctypes.c_void_p()
    call("aclmdlRICaptureEnd", on, ctypes.byref(graph))
    return graph


def fill(at, value, on, size=4096):
    call("aclrtMemsetAsync", at, ctypes.c_size_t(size), value, ctypes.c_size_t(size), on)


def copy(to, source, on, size=4096, kind=WITHIN_NPU):
    call("aclrtMemcpyAsync", to, ctypes.c_size_t(size), source, ctypes.c_size_t(size), kind, on)


def replay(graph, on):
    call("aclmdlRIExecuteAsync", graph, on)
    call("aclrtSynchronizeStream", on)
