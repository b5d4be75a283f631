# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Collectives between processes, against references computed here on the CPU in float64."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from harness.engines import npus
from sanitizers import without_sanitizers

SCRIPT = Path(__file__).with_name("hccl_scenarios.py")
sys.path.insert(0, str(SCRIPT.parent))
programs = importlib.import_module("hccl_scenarios")
MOVED, REDUCED, SIZES, data, torch_dtype = (
    programs.MOVED,
    programs.REDUCED,
    programs.SIZES,
    programs.data,
    programs.torch_dtype,
)


@pytest.fixture(scope="module")
def scenarios(run):
    """Every scenario's results by rank, from one process that imports torch once."""
    done = run("run", "--npus", "4", "--", sys.executable, str(SCRIPT), PYTHONPATH=npus.path())
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    return results | {"stderr": done.stderr}


def close(actual, expected, dtype):
    """Equal, except for one rounding of torch_npu's division by the number of ranks and of PROD."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0
    expected = expected.to(dtype).double() if dtype != torch.bool else expected.double()
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64), expected, rtol=eps, atol=0
    )


def reduced(op, values):
    """The reduction over ranks in their order, in float64 and rounded to the type at each step."""
    step = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "AVG": torch.add,
    }[op]
    dtype = values[0].dtype if values[0].is_floating_point() else torch.float64
    total = values[0].double()
    for value in values[1:]:
        total = step(total, value.double()).to(dtype).double()
    return total / len(values) if op == "AVG" else total


@pytest.mark.parametrize(("dtype", "op"), REDUCED)
@pytest.mark.parametrize(
    ("label", "ranks"), [("all_reduce 2", 2), ("all_reduce 3", 3), ("all_reduce tcp", 2)]
)
def test_all_reduce(scenarios, label, ranks, dtype, op):
    kind = torch_dtype(dtype)
    for size in SIZES:
        key = f"{dtype} {op} {size}"
        if key not in scenarios[label][0]:
            continue
        expected = reduced(op, [data(rank, (size,), kind) for rank in range(ranks)])
        if op == "AVG" and not kind.is_floating_point:
            expected = expected.trunc()
        if dtype == "bool":
            # torch_npu: a sum of booleans is their logical or.
            expected = expected.clamp(max=1)
        for rank in range(ranks):
            close(scenarios[label][rank][key], torch.cat([expected[:50], expected[-50:]]), kind)
        assert all(answer[key] == scenarios[label][0][key] for answer in scenarios[label]), (
            "ranks have other bits"
        )


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_moves(scenarios, ranks, name):
    dtype = torch_dtype(name)
    inputs = [data(rank, (4, 3), dtype) for rank in range(ranks)]
    many = [data(rank, (2 * ranks, 3), dtype, salt=1) for rank in range(ranks)]
    rows = [[r + p + 1 for p in range(ranks)] for r in range(ranks)]
    uneven = [
        data(rank, (sum(rows[rank]), 3), dtype, salt=2).split(rows[rank]) for rank in range(ranks)
    ]
    for rank, answer in enumerate(scenarios[f"moves {ranks}"]):
        expected = [
            inputs,
            torch.cat(inputs),
            inputs[-1],
            many[1].chunk(ranks)[rank],
            inputs if rank == 0 else None,
            torch.cat([each.chunk(ranks)[rank] for each in many]),
            torch.cat([each[rank] for each in uneven]),
            [each[rank] for each in uneven],
        ]
        assert answer[name] == programs.plain(expected)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions(scenarios, ranks, name):
    dtype = torch_dtype(name)

    def values(shape, salt):
        return [data(rank, shape, dtype, salt) for rank in range(ranks)]

    rows = [2 * p + 1 for p in range(ranks)]
    for rank, answer in enumerate(scenarios[f"reductions {ranks}"]):
        root, part, listed, uneven, gathered = answer[name]
        if rank == 1:
            close(root, reduced("SUM", values((6,), 0)), dtype)
        many = values((3 * ranks,), 1)
        close(part, reduced("MAX", many).chunk(ranks)[rank], dtype)
        close(listed, reduced("SUM", many).chunk(ranks)[rank], dtype)
        close(uneven, reduced("SUM", values((sum(rows),), 2)).split(rows)[rank], dtype)
        assert gathered == [
            programs.plain(data(p, (rows[p],), dtype, salt=3)) for p in range(ranks)
        ]


def test_repeated_sums_have_the_same_bits(scenarios):
    first, second = scenarios["bits"]
    assert first[:2] == [50, True]
    assert first == second


def test_the_order_of_a_sum_does_not_depend_on_its_size(scenarios):
    answers = scenarios["bits 3"]
    assert [same for same, _ in answers] == [True] * 3
    assert answers[0] == answers[1] == answers[2]


def test_point_to_point(scenarios):
    answers = scenarios["point to point"]
    for rank, (batch, total, last) in enumerate(answers):
        previous = (rank - 1) % 3
        assert batch == programs.plain(data(previous, (5,), torch.float32))
        assert total == int(data(previous, (300000,), torch.int32).sum())
        sent = data(0, (3,), torch.bfloat16)
        assert last == programs.plain([sent * 2, sent, None][rank])


def test_groups_and_objects(scenarios):
    for rank, (half, works, coalesced, objects, some) in enumerate(scenarios["groups"]):
        assert half == [4.0, 4.0, 4.0] if rank % 2 == 0 else [6.0, 6.0, 6.0]
        assert works == [6.0 + 4 * k for k in range(5)]
        assert coalesced == [6.0 * k for k in range(3)]
        assert objects == [{"rank": r, "text": "x" * r} for r in range(4)]
        assert some == [["a", 1], {"b": 2}]


def test_a_collective_comes_after_what_it_needs(scenarios):
    x = 0.0
    for step in range(20):
        x = (2 * x + 2 * step + 1) / 2
    assert scenarios["order of streams"] == [[x, x]] * 2


@pytest.mark.parametrize(
    ("label", "first", "second"),
    [
        ("call", "HcclAllReduce(4 float32, sum)", "HcclBroadcast(4 float32, root 0)"),
        ("count", "HcclAllReduce(4 float32, sum)", "HcclAllReduce(3 float32, sum)"),
        ("dtype", "HcclAllReduce(4 float32, sum)", "HcclAllReduce(4 int32, sum)"),
        ("reduction", "HcclAllReduce(4 float32, sum)", "HcclAllReduce(4 float32, max)"),
        ("kind", "HcclAllReduce(4 float32, sum)", "HcclRecv(4 float32)"),
    ],
)
def test_ranks_that_disagree_both_say_so(scenarios, label, first, second):
    one, other = scenarios[f"other {label}"]
    assert f"rank 1 called {second} where this rank called {first}" in one
    assert f"rank 0 called {first} where this rank called {second}" in other


def test_sizes_that_do_not_fit_together(scenarios):
    one, other = scenarios["other sizes"]
    assert "rank 1 sends 4 bytes" in one
    assert "12 are expected" in one
    assert "rank 0 sends 12 bytes" in other


def test_a_dead_rank_is_noticed(scenarios):
    first, second, third = scenarios["dead"]
    assert second == "rank 1 ended with status -9, without a result"
    for text, seconds in (first, third):
        assert "HcclAllReduce(1048576 float32, sum)" in text
        assert "rank 1 closed its connection: its process ended" in text
        assert seconds < 20  # of an HCCL_EXEC_TIMEOUT of 50


def test_watchdog_ends_the_process_with_the_reason(scenarios):
    # Rank 0 by std::terminate (SIGABRT), rank 1 by the scenario.
    assert scenarios["dead watched"] == [
        f"rank {rank} ended with status {-sig}, without a result" for rank, sig in ((0, 6), (1, 9))
    ]
    assert (
        "watchdog thread terminated with exception: [ascend-emulator] HcclAllReduce(4 float32, sum)"
        in scenarios["stderr"]
    )


def test_a_late_rank_is_given_up(scenarios):
    (text, seconds), (other, _) = scenarios["late"]
    assert "nothing from rank 1 in time" in text
    assert 2.9 < seconds < 20
    assert "rank 0 failed: HcclAllReduce" in other


def test_faults_on_demand(scenarios):
    for label, what in {
        "timeout": "until HCCL_EXEC_TIMEOUT (injected)",
        "drop": "the connections broke (injected)",
    }.items():
        (sum_, text, _), (_, other, _) = scenarios[label]
        assert sum_ == [2.0] * 4
        assert what in text
        assert "rank 0" in other
    assert [text for text, seconds in scenarios["delay"] if seconds >= 0.3] == ["no error"] * 2


def test_a_rank_that_never_comes(scenarios):
    text, seconds = scenarios["absent"][0]
    assert "rank 0 of 2: rank 1 did not come within 1 s (HCCL_CONNECT_TIMEOUT)" in text
    assert seconds < 20


def test_what_hccl_does_not_reduce_is_refused(scenarios):
    errors = scenarios["unsupported"][0]
    assert "Unsupported data type at::kDouble" in errors["float64 sum"]
    expected = (
        "the data type of a reduction by prod is bfloat16; allowed on Ascend910B1: int8, int32,"
        " int64, float16, float32"
    )
    assert f"HcclAllReduce: {expected}" in errors["bfloat16 prod"]


def test_c_interface(scenarios):
    answer = scenarios["one process"][0]
    for rank, (calls, values, size, local_rank, name) in enumerate(answer["results"]):
        assert calls == [0] * 9
        exchanged = [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]][rank]
        assert values == [
            [1.0, 3.0, 5.0, 7.0],
            [0.0, 1.0, 2.0],
            exchanged,
            [float(rank), rank + 1.0],
        ]
        assert (size, local_rank) == (2, rank)
        assert name == answer["results"][0][4] != ""
    assert answer["texts"] == ["no error", "timeout"]


def test_destroying_a_communicator_ends_what_waits(scenarios):
    text, seconds = scenarios["one process"][0]["destroyed"]
    assert "HcclAllReduce(4 float32, sum) on communicator" in text
    assert "the communicator was destroyed or suspended meanwhile" in text
    assert seconds < 20


@pytest.mark.parametrize(
    ("place", "status", "text"),
    [
        (0, 1, "HcclAllReduce: unknown data type 99"),
        (1, 1, "HcclAllReduce: the reduction is 7; allowed: 0 (sum), 1 (prod), 2 (max), 3 (min)"),
        (
            2,
            5,
            (
                "HcclAllReduce: the data type of a reduction by sum is float64; allowed on"
                " Ascend910B1: int8, int16,"
            ),
        ),
        (3, 1, "HcclAllReduce: sendBuf is not device memory"),
        (4, 2, "HcclAllReduce: sendBuf is null"),
        (5, 1, "HcclBroadcast: the count is 1099511627776; no NPU holds that many elements"),
        (6, 1, "HcclBroadcast: root is 2; the communicator has 2 ranks"),
        (7, 5, "HcclSend: the data type is float8_e4m3; allowed on Ascend910B1: int8, uint8,"),
        (8, 1, "HcclAlltoAll: sendBuf and recvBuf are the same; they must not be"),
        (9, 1, "HcclGroupEnd: no HcclGroupStart came before"),
        (10, 0, ""),
        (11, 1, "is no communicator, or it was destroyed"),
    ],
)
def test_c_interface_refuses(scenarios, place, status, text):
    code, message = scenarios["one process"][0]["errors"][place]
    assert code == status
    assert text in message


def test_lent_memory_is_remembered(scenarios):
    register, exchange, deregister = [1, 0], [0, 6, 2, 2], [0, 6]
    # No range there; not all of it is mapped; it is; it is active already; the range is in use.
    activate, end = [0, 6, 1, 0, 1], [1, 0, 0]
    assert (
        scenarios["one process"][0]["windows"] == register + exchange + deregister + activate + end
    )


def test_communicators_by_root_information(scenarios):
    for rank, (calls, received, total) in enumerate(scenarios["by root"][0]):
        assert calls == [0] * 6
        assert received == [2.0 - rank] * 3
        assert total == [3.0] * 3


def test_rank_table_and_sub_communicator(scenarios):
    for rank, (status, total, no_sub, name, wrong, text) in enumerate(scenarios["rank table"]):
        assert status == [0, "", 0, 0, 0, 0, 0]
        assert total == [6.0] * 4  # summed twice
        assert no_sub == (rank == 0)
        assert name == ["", "part"][rank]
        assert wrong == 1
        assert "the rank table is not JSON at character 40" in text


def test_rank_table_with_escaped_characters(scenarios):
    assert scenarios["escaped table"][0] == [0, "", *[True] * 4]


def test_servers_of_a_rank_table_must_have_addresses(scenarios):
    resolved, text, configured, reason = scenarios["wrong tables"][0]
    assert resolved == configured == 1
    assert (
        "server_id 'node_0.invalid' is no IPv4 address and does not resolve; give the server's"
        " host_ip" in text
    )
    assert "hcclBufferSize is 0; allowed: from 1 (MiB)" in reason


def test_streams_that_cross_are_refused(scenarios):
    first, second = scenarios["crossed sends"][0]
    assert (
        "rank 0 runs HcclSend(4 float32) ahead of 1 issued earlier and this rank in turn" in second
    )
    assert "in another order than they were issued" in first


def test_streams_that_an_event_orders_are_not(scenarios):
    assert scenarios["order by events"][0] == [[[0, 0, 0], [1.0, 21.0, 41.0]]] * 2


def test_a_collective_past_a_mapping_is_refused(scenarios):
    code, text = scenarios["past a mapping"][0][0]
    assert code == 1
    assert "HcclBroadcast: buf: 268435456 bytes at" in text


def test_an_npu_has_one_rank(scenarios):
    code, text = scenarios["one NPU twice"][0]
    assert code == 1
    assert "devices[0] and devices[1] are both 1; each rank has an NPU of its own" in text


def test_wrong_devices_are_answered_at_once(scenarios):
    (absent, first), (full, second) = scenarios["bad devices"][0]
    assert "HcclCommInitAll: device 99 asked for, 2 present" in absent
    assert "the buffers of communicator" in full
    assert "2 x 16 MiB (HCCL_BUFFSIZE): out of memory on NPU 1" in full
    assert max(first, second) < 15  # of an HCCL_CONNECT_TIMEOUT of 20


def test_sub_communicators_of_a_parent_with_a_used_address(scenarios):
    assert scenarios["parents"][0][0] == [[0] * 4] * 2


def test_ranks_of_one_machine_do_not_listen_on_tcp(scenarios):
    for rank, (sockets, total) in enumerate(scenarios["listens"]):
        assert sockets == (rank == 0)  # rank 0 serves the store
        assert total == [2.0] * 4


def test_buffers_are_device_memory(scenarios):
    for mebibytes, text in scenarios["buffers"]:
        assert mebibytes == [200, 200]
        assert "the buffers of communicator" in text
        assert "2 x 100 MiB (HCCL_BUFFSIZE): out of memory on NPU" in text


def test_communicators_with_the_same_buffer_name_share_it(scenarios):
    assert scenarios["shared buffers"] == [[200, 0, 0, -200]] * 2


@without_sanitizers("an allocation that fails ends the process")
def test_a_rank_without_host_memory_says_so(scenarios):
    (local_error, _), (other, seconds) = scenarios["host memory"]
    assert "the host has no memory for it" in local_error
    assert "rank 0 failed: HcclAllReduce(67108864 float32, sum)" in other
    assert seconds < 20


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # They are rejected, and the ranks of the communicator connect after them.
        ("strangers", ""),
        # They do not delay the ranks, one of which sends its handshake in two segments.
        ("silent strangers", ""),
        (
            "another number of ranks",
            "rank 1 counts 2 ranks, rank 0 counts 3; it must be the same on all",
        ),
        ("its own rank", "rank 0 connects to rank 0 of 3; a rank connects to lower ranks"),
        ("a rank that is not there", "rank 3 connects to rank 0 of 3"),
        ("a rank twice", "two ranks call themselves 1"),
    ],
)
def test_what_a_rank_says_when_it_connects_is_checked(scenarios, name, text):
    (answers,) = scenarios["handshakes"]
    status, message = answers[name]
    assert (status != 0) == bool(text), message
    assert text in message


def test_stranger_cannot_read_the_secret_or_become_a_rank(scenarios):
    (seen,) = scenarios["stranger"]
    assert not seen["token"]
    assert seen["status"] != 0
    assert (
        "what the store has of rank 1 is not signed with the communicator's secret"
        in seen["message"]
    )


def test_the_root_listens_at_the_loopback_address_only(scenarios):
    assert scenarios["stranger"][0]["listening"] == ["0100007F"]


def test_reasons_why_the_root_cannot_be_asked(scenarios):
    (lost, first), (elsewhere, second), (forged, third) = scenarios["lost store"][0]
    assert (
        "rank 1 of 2: rank 0, which has the store, ended or closed the connection; look at its"
        " output" in lost
    )
    assert (
        "the root listens at 127.0.0.1, and this rank is on another machine or in another network"
        " namespace; fix: " in elsewhere
    )
    assert "what the store has of rank 0 is not signed with the communicator's secret" in forged
    assert max(first, second, third) < 15  # of an HCCL_CONNECT_TIMEOUT of 20


SHAPES = """
import torch, torch_npu, torch.distributed as dist
dist.init_process_group("hccl")
torch.npu.set_device(rank := dist.get_rank())
dist.all_reduce(torch.ones(4 + rank).npu())
torch.npu.synchronize()
"""


def test_torchrun_ends_with_the_cause(run, tmp_path):
    """torch_npu's watchdog aborts the processes; torchrun's report comes last."""
    (tmp_path / "program.py").write_text(SHAPES)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    program = (*torchrun, "--standalone", str(tmp_path / "program.py"))
    done = run("run", "--npus", "2", "--", *program)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-20:]
    (report, *_) = [line for line in last if line.strip().startswith("traceback : HcclAllReduce")]
    assert re.search(r"rank [01] called HcclAllReduce\([45] float32, sum\) where this rank", report)
