# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run: --npus 2
# refused: in another order than they were issued
# source: HCCL, order of calls of a communicator
# seen on hardware: no
"""Two streams share a communicator and no event orders them: rank 0 begins with the second sum,
rank 1 with the first.

The sums have one shape, so each rank adds its first values to the other's second ones.
"""

import ctypes
import threading

import torch
import torch_npu  # noqa: F401

FLOAT, SUM = 4, 0
hccl = ctypes.CDLL("libhccl.so")
for npu in range(2):
    torch.ones(1, device=f"npu:{npu}")
communicators = (ctypes.c_void_p * 2)()
assert hccl.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), communicators) == 0
errors = []


def all_reduce(rank: int, x: torch.Tensor, stream: torch.npu.Stream) -> None:
    address, communicator = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(communicators[rank])
    assert (
        hccl.HcclAllReduce(
            address,
            address,
            ctypes.c_uint64(4),
            FLOAT,
            SUM,
            communicator,
            ctypes.c_void_p(stream.npu_stream),
        )
        == 0
    )


def work(rank: int) -> None:
    torch.npu.set_device(rank)
    streams = torch.npu.Stream(), torch.npu.Stream()
    sums = [torch.full((4,), 10.0 * k + rank, device="npu") for k in range(2)]
    x = torch.ones(1500, 1500, device="npu")
    torch.npu.synchronize()
    # One stream is late: the first on rank 0, the second on rank 1.
    with torch.npu.stream(streams[rank]):
        for _ in range(60):
            x = x @ x / 1500
    torch.npu.current_stream().synchronize()
    for each, stream in zip(sums, streams, strict=True):
        all_reduce(rank, each, stream)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        errors.append(error)
    else:
        print(f"rank {rank}: {[each[0].item() for each in sums]}, expected [1.0, 21.0]")


threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if errors:
    raise errors[0]
