# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streams, events, copies and memory, as torch.npu shows them."""

import faulthandler
import os
import signal
import time

import pytest
import torch
import torch_npu

MIB = 1 << 20


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("size", [0, 1, 511, 513, 3 * MIB])
def test_copies_there_and_back(size, dtype):
    x = torch.randint(0, 2, (size,)).to(dtype)
    assert torch.equal(x.npu().cpu(), x)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_pinned_and_waiting(pinned, waiting):
    source, target = torch.randn(1000, pin_memory=pinned), torch.zeros(1000, pin_memory=pinned)
    assert source.is_pinned() is pinned
    there = source.to("npu", non_blocking=not waiting)
    target.copy_(there * 2, non_blocking=not waiting)
    torch.npu.synchronize()
    assert torch.equal(target, source * 2)


def test_strided_copies_between_host_and_device():
    x = torch.randn(6, 8)
    y = torch.zeros(8, 6, device="npu").t()
    y[:, ::2] = x[:, ::2]
    y[:, 1::2].copy_(x.t().contiguous().t()[:, 1::2])
    back = torch.zeros(6, 16)[:, ::2]
    back.copy_(y)
    assert torch.equal(back, x)
    assert torch.equal(y.to(torch.bfloat16).cpu(), x.bfloat16())


def test_copies_on_the_device():
    x = torch.arange(1000, device="npu")
    y = torch.empty_like(x).copy_(x)
    assert y.data_ptr() != x.data_ptr()
    x.zero_()
    assert y.tolist() == list(range(1000))
    y[1:].copy_(y[:-1].clone())
    assert y[:3].tolist() == [0, 0, 1]


def test_work_on_a_stream_of_its_own():
    stream, event = torch.npu.Stream(), torch.npu.Event()
    x = torch.randn(64, 64)
    here = x.npu()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        product = here @ here
        product.record_stream(stream)
        event.record()
    torch.npu.current_stream().wait_event(event)
    result = product + 1
    stream.synchronize()
    assert event.query()
    assert stream.query()
    torch.testing.assert_close(result.cpu(), x @ x + 1, atol=1e-4, rtol=1e-4)


def test_events_measure_time_and_can_be_recorded_again():
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    assert first.query()  # never recorded
    started = time.monotonic()
    first.record()
    x = torch.randn(512, 512, device="npu")
    for _ in range(4):
        x = torch.tanh(x @ x)
    second.record()
    second.synchronize()
    milliseconds = (time.monotonic() - started) * 1000
    elapsed = first.elapsed_time(second)
    assert 0 < elapsed <= milliseconds
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= elapsed
    with pytest.raises(RuntimeError, match="recorded"):
        first.elapsed_time(torch.npu.Event(enable_timing=True))


def test_pinned_memory_lives_until_its_copy_is_done():
    total = torch.zeros(1, device="npu")
    for i in range(50):
        total += torch.full((1,), float(i)).pin_memory().to("npu", non_blocking=True)
    assert total.item() == 1225


def test_memory_is_accounted_for():
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    assert (
        total
        == int(os.environ["ASCEND_EMULATOR_MEMORY"])
        == torch.npu.get_device_properties(0).total_memory
    )
    allocated, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - allocated >= 64 * MIB
    assert free - torch.npu.mem_get_info()[0] == torch.npu.memory_reserved() - reserved >= 64 * MIB
    del x
    assert torch.npu.memory_allocated() == allocated
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free, total)


def test_out_of_memory_is_torchs_exception_and_no_end():
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    held = [torch.empty(free // 2, dtype=torch.uint8, device="npu")]
    with pytest.raises(torch.OutOfMemoryError):
        held.append(torch.empty(free // 2 + 64 * MIB, dtype=torch.uint8, device="npu"))
    held.clear()
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free
    assert torch.ones(9, device="npu").sum().item() == 9


def test_new_memory_after_much_is_freed_in_any_order():
    blocks = [
        torch.full((n * 97 * 1024,), n, dtype=torch.int32, device="npu") for n in range(1, 30)
    ]
    for block in blocks[::2]:
        assert block.unique().numel() == 1
    kept = blocks[1::2]
    del blocks
    torch.npu.empty_cache()
    more = [torch.full((n * 31 * 1024,), -n, dtype=torch.int32, device="npu") for n in range(1, 60)]
    for block in [*kept, *more]:
        assert block.min().item() == block.max().item()


def end_of(read):
    """The signal that ends a process which reads at an address, 0 if none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # A sanitizer has a handler of its own.
        read()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def test_host_cannot_read_device_memory():
    import ctypes

    x = torch.ones(64)
    y = x.npu()
    torch.npu.synchronize()
    assert end_of(lambda: ctypes.string_at(x.data_ptr(), 4)) == 0
    assert end_of(lambda: ctypes.string_at(y.data_ptr(), 4)) == signal.SIGSEGV
    assert end_of(lambda: ctypes.memset(y.data_ptr(), 0, 4)) == signal.SIGSEGV


def test_versions_and_properties():
    properties = torch.npu.get_device_properties(0)
    assert (properties.name, properties.cube_core_num, properties.vector_core_num) == (
        "Ascend910B1",
        24,
        48,
    )
    assert properties.L2_cache_size == 192 * MIB
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    assert torch_npu.npu.utils.get_cann_version() == "9.1.0"
    assert torch.npu.is_bf16_supported()
    with pytest.raises((RuntimeError, AssertionError), match=r"[Ii]nvalid device"):
        torch.npu.mem_get_info(7)


def test_printing(capsys):
    print(torch.arange(6.0).view(2, 3).npu().bfloat16(), torch.tensor([1, 2]).npu())
    assert capsys.readouterr().out.split("\n")[0] == "tensor([[0., 1., 2.],"


def test_determinism_can_be_asked_for():
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(50, 50, device="npu")
        assert torch.equal(x @ x, x @ x)
    finally:
        torch.use_deterministic_algorithms(False)
