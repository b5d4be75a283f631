# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streams of the connector's threads."""

import ctypes
import threading

import pytest
import torch
from ascend_kv_connector.p2p.rank import private_stream


@pytest.mark.parametrize("fails", [False, True])
def test_device_work_has_completed_on_exit(fails: bool) -> None:
    """Also after an error: a buffer that is copied to would be lent to another reader."""
    source = torch.ones(1000, dtype=torch.uint8, device="npu")
    target = torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
    torch.npu.synchronize()
    released, entered = threading.Event(), threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait(60) and None)
    seen: list[bool] = []

    def work() -> None:
        try:
            with private_stream(source.device):
                stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
                assert not ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc(stream, wait, None)
                target.copy_(source, non_blocking=True)
                entered.set()
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        seen.append(bool(target.all()))

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    thread.join(0.3)
    assert seen == []
    released.set()
    thread.join(30)
    assert seen == [True]
