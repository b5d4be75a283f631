# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL's rank tables, by its C interface: for test_hccl.py."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from harness.engines.ports import reserve_port
from hccl_c_scenarios import FLOAT, SUM, address, library, message
from hccl_ranks import plain, scenario


@scenario("rank table", ranks=2, plain_c="1")
def rank_table(rank: int, ranks: int) -> Any:
    """Communicators from a file that describes the cluster, and one of a communicator's ranks."""
    directory = Path(os.environ["SCENARIO_DIRECTORY"])
    if rank == 0:
        _held, port = reserve_port()
        devices = [
            {"device_id": str(i), "device_ip": f"192.0.2.{i}", "rank_id": str(i)}
            for i in range(ranks)
        ]
        table = {
            "status": "completed",
            "version": "1.0",
            "server_count": "1",
            "server_list": [{"server_id": "node", "device": devices}],
        }
        (directory / "table").write_text(json.dumps(table))
        (directory / "port").write_text(str(port))
        os.rename(directory / "port", directory / "ready")
    while not (directory / "ready").exists():
        time.sleep(0.01)
    os.environ["HCCL_IF_BASE_PORT"] = (directory / "ready").read_text()
    hccl, comm, sub = library(), ctypes.c_void_p(), ctypes.c_void_p()
    x = torch.full((4,), float(rank + 1), device="npu")
    torch.npu.synchronize()
    status = [
        hccl.HcclCommInitClusterInfo(str(directory / "table").encode(), rank, ctypes.byref(comm)),
        message(),
    ]
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    status.append(
        hccl.HcclAllReduce(address(x), address(x), ctypes.c_uint64(4), FLOAT, SUM, comm, stream)
    )
    # As HcclCommConfigInit sets it: the size first, the name after two numbers.
    config = ctypes.create_string_buffer(4096)
    ctypes.memmove(config, ctypes.byref(ctypes.c_uint64(160)), 8)
    # The size of its buffers is unset.
    ctypes.memmove(ctypes.byref(config, 24), ctypes.byref(ctypes.c_uint32(0xFFFFFFFF)), 4)
    ctypes.memmove(ctypes.byref(config, 32), b"part", 4)
    members, name = (ctypes.c_uint32 * 1)(1), ctypes.create_string_buffer(128)
    one, none = ctypes.c_uint64(1), ctypes.c_uint64(0xFFFFFFFF)
    if rank == 1:
        status.append(
            hccl.HcclCreateSubCommConfig(
                ctypes.byref(comm), 1, members, one, 0, config, ctypes.byref(sub)
            )
        )
        hccl.HcclGetCommName(sub, name)
    else:
        status.append(
            hccl.HcclCreateSubCommConfig(
                ctypes.byref(comm), 0, None, none, 0, config, ctypes.byref(sub)
            )
        )
    torch.npu.synchronize()
    # Once more, by a configuration. Rank 1 may be ahead and make its next communicator while rank 0
    # still has the last one.
    time.sleep(0.3 * (rank == 0))
    status.append(hccl.HcclCommDestroy(comm))
    status.append(
        hccl.HcclCommInitClusterInfoConfig(
            str(directory / "table").encode(), rank, config, ctypes.byref(comm)
        )
    )
    status.append(
        hccl.HcclAllReduce(address(x), address(x), ctypes.c_uint64(4), FLOAT, SUM, comm, stream)
    )
    torch.npu.synchronize()
    (directory / "wrong").write_text('{"status": "completed", "server_list": [')
    wrong = hccl.HcclCommInitClusterInfo(
        str(directory / "wrong").encode(), rank, ctypes.byref(comm)
    )
    return [status, plain(x), sub.value is None, name.value.decode(), wrong, message()]


@scenario("escaped table", ranks=1, plain_c="1")
def escaped_table(rank: int, ranks: int) -> Any:
    """A rank table with what JSON may have: escaped characters, and others than ASCII."""
    torch.ones(1, device="npu")
    path, comm, out = Path(os.environ["SCENARIO_DIRECTORY"]) / "table", ctypes.c_void_p(), []
    device = '{"device_id": "0", "rank_id": "\\u0030"}'
    host = r'"note": "a \"quoted\" \\ \u00e9\ud83d\ude00 \/ path", "server_id": "127.0.0.1"'
    path.write_text(
        f'{{"status": "comp\\u006ceted", "server_list": [{{{host}, "device": [{device}]}}]}}'
    )
    out.append(library().HcclCommInitClusterInfo(str(path).encode(), 0, ctypes.byref(comm)))
    out.append(message() if out[0] else "")
    for wrong in (r'"\x"', r'"\u12"', r'"\ud83d"', '"open'):
        path.write_text(f'{{"status": {wrong}')
        assert library().HcclCommInitClusterInfo(str(path).encode(), 0, ctypes.byref(comm)) == 1
        out.append("the rank table is not JSON at character" in message())
    return out


@scenario("wrong tables", ranks=1, plain_c="1")
def wrong_tables(rank: int, ranks: int) -> Any:
    """Servers that are names which mean nothing, and a configuration with no buffer."""
    torch.ones(1, device="npu")
    path = Path(os.environ["SCENARIO_DIRECTORY"]) / "table"
    servers = [
        {"server_id": f"node_{i}.invalid", "device": [{"device_id": "0", "rank_id": str(i)}]}
        for i in range(2)
    ]
    path.write_text(
        json.dumps(
            {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers}
        )
    )
    comm, config = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
    out = [library().HcclCommInitClusterInfo(str(path).encode(), 0, ctypes.byref(comm)), message()]
    ctypes.memmove(config, ctypes.byref(ctypes.c_uint64(160)), 8)
    path.write_text(json.dumps({"status": "completed", "server_list": servers[:1]}))
    return [
        *out,
        library().HcclCommInitClusterInfoConfig(str(path).encode(), 0, config, ctypes.byref(comm)),
        message(),
    ]
