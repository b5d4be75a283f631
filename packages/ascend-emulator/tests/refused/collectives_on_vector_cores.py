# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run: --npus 2
# refused: with HCCL_OP_EXPANSION_MODE=AIV collectives of several communicators must not overlap
# source: CANN, HCCL_OP_EXPANSION_MODE
# seen on hardware: no
"""With `HCCL_OP_EXPANSION_MODE=AIV`, sums of two communicators on two streams of an NPU that no
event orders"""

import ctypes
import os
import time

os.environ["HCCL_OP_EXPANSION_MODE"] = "AIV"

import torch
import torch_npu  # noqa: F401

FLOAT, SUM = 4, 0
hccl = ctypes.CDLL("libhccl.so")
for npu in range(2):
    torch.ones(1, device=f"npu:{npu}")
groups = [(ctypes.c_void_p * 2)() for _ in range(2)]
for each in groups:
    assert hccl.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), each) == 0
for rank in range(2):  # rank 0's wait for rank 1's
    torch.npu.set_device(rank)
    time.sleep(3 * rank)  # until rank 0's two sums wait
    for each in groups:
        x, stream = torch.full((4,), float(rank), device="npu"), torch.npu.Stream()
        address, one = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(each[rank])
        torch.npu.current_stream().synchronize()
        assert (
            hccl.HcclAllReduce(
                address,
                address,
                ctypes.c_uint64(4),
                FLOAT,
                SUM,
                one,
                ctypes.c_void_p(stream.npu_stream),
            )
            == 0
        )
        if rank:
            stream.synchronize()
print("summed")
