# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cases of refusals: whether the device refuses a call, and with which of CANN's codes."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache, partial
from typing import Any

from ascend_emulator.verify import operators
from ascend_emulator.verify.errors import described
from ascend_emulator.verify.lazy import torch
from ascend_emulator.verify.tables import Case


class StatusError(RuntimeError):
    """A call of CANN's C interface returned a status."""


@cache
def library() -> ctypes.CDLL:
    """libascendcl.so, which torch_npu has loaded."""
    return ctypes.CDLL("libascendcl.so")


def call(name: str, *arguments: Any) -> None:
    """Call a function of CANN's runtime.

    Raises:
        StatusError: it returned a status other than 0.
        AttributeError: this CANN lacks the function.
    """
    sizes = [
        ctypes.c_void_p(each) if isinstance(each, int) and each > 1 << 31 else each
        for each in arguments
    ]
    status = getattr(library(), name)(*sizes)
    if status:
        raise StatusError(f"{name} returned {status}")


def memory(size: int) -> ctypes.c_void_p:
    """Device memory from aclrtMalloc."""
    address = ctypes.c_void_p()
    call("aclrtMalloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
    return address


def create(what: str) -> ctypes.c_void_p:
    """A stream or an event, from aclrtCreateStream or aclrtCreateEvent."""
    handle = ctypes.c_void_p()
    call(f"aclrtCreate{what}", ctypes.byref(handle))
    return handle


def capture(inside: Any) -> None:
    """Capture a graph whose body is the function, and end the capture whatever happens."""
    graph = torch.npu.NPUGraph()
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        graph.capture_begin()
        try:
            inside()
        except BaseException:
            with suppress(RuntimeError):  # The error of the body is the one to report.
                graph.capture_end()
            raise
        graph.capture_end()


def run(case: Case) -> dict[str, Any]:
    """Run a case on the current NPU; ``accepted`` if nothing refuses it."""
    names = operators.namespace() | {
        "C": ctypes,
        "acl": call,
        "memory": memory,
        "stream": partial(create, "Stream"),
        "event": partial(create, "Event"),
        "capture": capture,
    }
    names |= {name: value.npu() for name, value in operators.arguments(case).items()}
    torch.npu.synchronize()
    if case.before:
        exec(case.before, names)
    try:
        result = eval(case.call, names)
        torch.npu.synchronize()  # an asynchronous refusal comes here
    except AttributeError as error:
        return {"outcome": "absent", "error": described(error)}
    except Exception as error:
        description = described(error)
        if isinstance(error, StatusError):
            description["codes"] = [str(error).rpartition(" ")[2]]
        return {"outcome": "refused", "error": description}
    record: dict[str, Any] = {"outcome": "accepted"}
    if isinstance(result, torch.Tensor):
        values = result.cpu().flatten()[: operators.SHOWN].tolist()
        record["values"] = [str(value) for value in values]
    return record
