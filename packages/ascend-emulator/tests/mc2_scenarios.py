# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs for test_mc2.py: operators that compute and communicate. Run as hccl_scenarios.py is."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from cann_calls import Calls
from hccl_ranks import SCENARIOS, data, failure, plain, play, scenario, timed
from mc2_layer import Layer, routing, weights
from mc2_matmul_scenarios import name_of


def moe(rank: int, ranks: int) -> Any:
    out = {}
    for dtype in (torch.bfloat16, torch.float16):
        for case, tokens, uneven in (
            ("even", 6, False),
            ("uneven", 5, True),
            ("mask", 6, False),
            ("choices", 6, False),
        ):
            layer = Layer(rank, ranks, 8)
            x, ids, scales = (
                data(rank, (tokens, 64), dtype),
                routing(rank, tokens, 3, 8, uneven),
                weights(rank, tokens, 3),
            )
            mask = None
            if case == "mask":
                mask = torch.arange(tokens) < (rank % 3) * 2  # none of rank 0's take part
            elif case == "choices":
                mask = torch.arange(3 * tokens).view(tokens, 3) % 4 != rank % 4
            more = {} if mask is None else {"x_active_mask": mask.npu()}
            given = layer.dispatch(x, ids, expert_token_nums_type=1, **more)
            total = int(given[3].sum())
            sums = layer.dispatch(x, ids, expert_token_nums_type=0, **more)[3]
            y = layer.combine(layer.apply(given[0], given[3]), ids, given, scales, **more)
            out[f"{case} {dtype}"] = plain([y, given[0][:total], given[3], given[4], sums])
    return out


scenario("moe 2", ranks=2)(moe)
scenario("moe 4", ranks=4)(moe)


@scenario("different numbers of tokens", ranks=3)
def different(rank: int, ranks: int) -> Any:
    layer = Layer(rank, ranks, 6, global_bs=4 * ranks)
    tokens = 2 + rank
    x, ids, scales = (
        data(rank, (tokens, 32), torch.float16),
        routing(rank, tokens, 2, 6),
        weights(rank, tokens, 2),
    )
    given = layer.dispatch(x, ids)
    return plain(layer.combine(layer.apply(given[0], given[3]), ids, given, scales))


@scenario("quantized", ranks=2)
def quantized(rank: int, ranks: int) -> Any:
    """Dynamic quantization, weights that travel along, and packed values that go through as they
    are."""
    layer = Layer(rank, ranks, 4)
    x, ids = data(rank, (5, 64), torch.bfloat16), routing(rank, 5, 2, 4)
    x[1] = 0
    out = []
    for smooth in (None, data(0, (4, 64), torch.float32, salt=3).abs().npu()):
        given = layer.dispatch(x, ids, quant_mode=2, scales=smooth)
        total = int(given[3].sum())
        out.append(plain([given[0][:total], given[1][:total], given[3]]))
    given = layer.dispatch(x, ids, expert_scales=weights(rank, 5, 2).npu())
    out.append(plain([given[6][: int(given[3].sum())], given[4][:4]]))
    words = torch.arange(5 * 32, dtype=torch.int32).view(5, 32) * (rank + 1)
    given = layer.dispatch(
        words, ids, scales=weights(rank, 5, 1).view(5).npu(), comm_alg="fullmesh"
    )
    total = int(given[3].sum())
    out.append(plain([given[0][:total], given[1][:total]]))
    return out


@scenario("shared", ranks=4, soc="Ascend910_93")
def shared(rank: int, ranks: int) -> Any:
    """Two ranks with shared experts (one twice, or two once) before those with the others, and
    experts that are none."""
    out = []
    x, scales = data(rank, (4, 1024), torch.bfloat16), weights(rank, 4, 3)
    for number in (1, 2):
        layer = Layer(rank, ranks, 4, number, 2)
        ids = routing(rank, 4, 3, 4)
        given = layer.dispatch(x, ids)
        rows, more = layer.apply(given[0], given[3]), data(rank, (4, 1024), torch.bfloat16, salt=4)
        out.append(
            plain([layer.combine(rows, ids, given, scales, shared_expert_x=more.npu()), given[3]])
        )
    layer = Layer(rank, ranks, 4, zero_expert_num=1, copy_expert_num=1, const_expert_num=2)
    ids = routing(rank, 4, 3, 8)
    given = layer.dispatch(x, ids)
    alphas = [data(0, (2, 1024), torch.bfloat16, salt=5 + i).npu() for i in range(3)]
    special = {
        "ori_x": x.npu(),
        "const_expert_alpha_1": alphas[0],
        "const_expert_alpha_2": alphas[1],
        "const_expert_v": alphas[2],
    }
    rows = layer.apply(given[0], given[3])
    out.append(plain([layer.combine(rows, ids, given, scales, **special)]))
    residual, gamma = (
        data(rank, (4, 1, 1024), torch.bfloat16, salt=8),
        data(0, (1024,), torch.bfloat16, salt=9),
    )
    normalized = torch_npu.npu_moe_distribute_combine_add_rms_norm(
        expand_x=rows,
        expert_ids=ids.npu(),
        expand_idx=given[2],
        ep_send_counts=given[4],
        expert_scales=scales.npu(),
        residual_x=residual.npu(),
        gamma=gamma.npu(),
        norm_eps=1e-5,
        shared_expert_x=data(rank, (4, 1024), torch.bfloat16, salt=4).npu(),
        **layer.common,
        **special,
    )
    out.append(plain(list(normalized)))
    return out


@scenario("first interface", ranks=8, soc="Ascend910_93")
def first(rank: int, ranks: int) -> Any:
    layer = Layer(rank, ranks, 8)
    x, ids, scales = (
        data(rank, (2, 7168), torch.float16),
        routing(rank, 2, 3, 8),
        weights(rank, 2, 3),
    )
    given = layer.dispatch(x, ids, first=True)
    y = torch_npu.npu_moe_distribute_combine(
        expand_x=layer.apply(given[0], given[3]),
        expert_ids=ids.npu(),
        expand_idx=given[2],
        ep_send_counts=given[4],
        expert_scales=scales.npu(),
        **layer.common,
    )
    return plain([y, given[2], given[4]])


@scenario("versions", ranks=2, soc="Ascend910_93")
def versions(rank: int, ranks: int) -> Any:
    """Versions of an older CANN: which of their outputs equal the newest version's, and what they
    refuse."""
    calls, layer = Calls(), Layer(rank, ranks, 4)
    x, ids, scales = (
        each.npu()
        for each in (
            data(rank, (4, 1024), torch.bfloat16),
            routing(rank, 4, 3, 4),
            weights(rank, 4, 3),
        )
    )
    group, given = layer.common["group_ep"], layer.dispatch(x, ids)
    total, rows = int(given[3].sum()), layer.apply(given[0], given[3])
    place, experts = (group, ranks, rank, 4, "", 1, 0, 0, 1, 0), (0, 0, 0)
    after = {"V2": ((), ()), "V3": ((None,), experts)}
    equal, messages, unlike = {}, [], []
    for version, (elastic, numbers) in after.items():
        outs = [torch.zeros_like(each) for each in given]
        common = (x, ids, None, None, None, *elastic, *place)
        calls.compute(
            f"MoeDistributeDispatch{version}", *common, 0, 4 * ranks, 1, "", *numbers, *outs
        )
        pairs = [
            (outs[0][:total], given[0][:total]),
            (outs[2][: 3 * total], given[2][: 3 * total]),
            *zip(outs[3:5], given[3:5], strict=True),
        ]
        equal[f"dispatch {version}"] = [torch.equal(*pair) for pair in pairs]
        messages.append(
            calls.refusal(
                f"MoeDistributeDispatch{version}", *common, 0, 4 * ranks + 1, 1, "", *numbers, *outs
            )
        )
    newest, out = layer.combine(rows, ids, given, scales), torch.zeros_like(x)
    tensors = (rows, ids, given[2], given[4], scales)
    for version, (elastic, numbers) in after.items():
        common = (
            *tensors,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            *elastic,
            *[None] * (4 if elastic else 0),
            *place,
        )
        calls.compute(
            f"MoeDistributeCombine{version}", *common, 4 * ranks, 0, 0, 0, "", *numbers, out
        )
        equal[f"combine {version}"] = [torch.equal(out, newest)]
        messages.append(
            calls.refusal(
                f"MoeDistributeCombine{version}", *common, 4 * ranks, 0, 1, 0, "", *numbers, out
            )
        )
        with_shared = (*common[:11], x, *common[12:])
        unlike.append(
            calls.refusal(
                f"MoeDistributeCombine{version}",
                *with_shared,
                4 * ranks,
                0,
                0,
                0,
                "",
                *numbers,
                out,
            )
        )
    residual, gamma = (
        data(rank, (4, 1, 1024), torch.bfloat16, salt=8).npu(),
        data(0, (1024,), torch.bfloat16, salt=9).npu(),
    )
    added = torch_npu.npu_moe_distribute_combine_add_rms_norm(
        expand_x=rows, expert_ids=ids, expand_idx=given[2], ep_send_counts=given[4], expert_scales=scales, residual_x=residual,
        gamma=gamma, norm_eps=1e-5, **layer.common,
    )  # fmt: skip
    outs = [torch.zeros_like(each) for each in added]
    given_norm = (*tensors, residual, gamma, *[None] * 7, *place, 4 * ranks, 0, 0, 0, "", 1e-5)
    calls.compute("MoeDistributeCombineAddRmsNorm", *given_norm, *outs)
    equal["combine and norm"] = [torch.equal(*pair) for pair in zip(outs, added, strict=True)]
    for changes in (
        {6: gamma[:9]},
        {5: residual.half()},
        {23: 1},  # shared_expert_rank_num
        {13: x[:, None]},  # shared_expert_x
        {1: ids.repeat(1, 3), 4: scales.repeat(1, 3)},
    ):
        changed = [changes.get(place, each) for place, each in enumerate(given_norm)]
        unlike.append(calls.refusal("MoeDistributeCombineAddRmsNorm", *changed, *outs))
    calls.compute("DistributeBarrier", x, group, ranks)
    messages.append(calls.refusal("DistributeBarrier", x, group, ranks + 1))
    # The dispatch has algorithms that the combine does not have, and one without shared experts.
    for more in (
        {"comm_alg": "fullmesh_v1"},
        {"comm_alg": "hierarchy", "shared_expert_rank_num": 1},
    ):
        other = Layer(rank, ranks, 4, **more)
        messages.append(failure(lambda other=other: other.combine(rows, ids, given, scales)))
    return [equal, messages, unlike]


@scenario("update", ranks=1, soc="Ascend910_93")
def update(rank: int, ranks: int) -> Any:
    """Logical experts to physical ones."""
    ids = routing(0, 5, 3, 4)
    table = torch.tensor(
        [[2, 0, 1, 9], [1, 2, 9, 9], [3, 3, 4, 5], [1, 6, 9, 9]], dtype=torch.int32
    )
    scales = weights(0, 5, 3).sort(1, descending=True).values
    threshold, active = (
        torch.tensor([0.1, 0.3, 0.4]),
        torch.tensor([True, True, True, False, False]),
    )
    by_token = torch_npu.npu_moe_update_expert(
        ids.npu(),
        table.npu(),
        expert_scales=scales.npu(),
        pruning_threshold=threshold.npu(),
        active_mask=active.npu(),
        balance_mode=1,
    )
    by_rank = torch_npu.npu_moe_update_expert(
        ids.npu(), table.npu(), local_rank_id=3, world_size=4, balance_mode=0
    )
    return plain([ids, table, scales, *by_token, by_rank[0]])


@scenario("graph")
def graph(rank: int, ranks: int) -> Any:
    """A layer that is captured once and replayed with other tokens."""
    layer = Layer(rank, ranks, 4)
    x, ids = (
        torch.zeros(3, 32, dtype=torch.float16, device="npu"),
        torch.zeros(3, 2, dtype=torch.int32, device="npu"),
    )
    scales = weights(rank, 3, 2).npu()
    captured = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(captured):
        given = layer.dispatch(x, ids)
        y = layer.combine(given[0] * 2, ids, given, scales)
    out = []
    for step in range(2):
        x.copy_(data(rank, (3, 32), torch.float16, salt=step))
        ids.copy_(routing(rank + 5 * step, 3, 2, 4))
        captured.replay()
        out.append(plain(y))
    return out


@scenario("refused")
def refused(rank: int, ranks: int) -> Any:
    """At the call, each by its own reason; nothing is wrong with the communicator after that."""
    layer, x, ids = (
        Layer(rank, ranks, 4),
        data(rank, (3, 64), torch.float16),
        routing(rank, 3, 2, 4),
    )
    zeros = torch.zeros(2048, dtype=torch.int32, device="npu")
    many = torch.arange(17, dtype=torch.int32).repeat(3, 1)
    a, b = x.new_zeros(2, 256).npu(), x.new_zeros(256, 16).npu()

    def other(experts: int = 4, **more: Any) -> Callable[[], Any]:
        common_options = {
            name: value
            for name, value in more.items()
            if name in {*layer.common, "tp_world_size", "global_bs"}
        }
        rest = {name: value for name, value in more.items() if name not in common_options}
        return lambda: Layer(rank, ranks, experts, **common_options).dispatch(x, ids, **rest)

    def of_variables() -> Any:
        """Without a comm_alg, with variables that choose hierarchy."""
        variables = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}
        os.environ.update(variables)
        try:
            layer.dispatch(x, ids)
            torch.npu.synchronize()
        finally:
            for name in variables:
                del os.environ[name]

    calls: list[Callable[[], Any]] = [
        other(group_ep="nobody"),
        other(ep_world_size=3),
        other(ep_rank_id=1 - rank),
        other(tp_world_size=2),
        other(experts=5),
        other(comm_alg="fullmesh_v1"),
        other(quant_mode=2, scales=torch.ones(3, 64, device="npu")),
        other(global_bs=4),
        other(zero_expert_num=1, const_expert_num=1),
        lambda: Layer(rank, ranks, 32).dispatch(x, many),
        lambda: layer.dispatch(data(rank, (3, 48), torch.float16), ids),
        lambda: layer.dispatch(x, ids, elastic_info=ids[0].npu()),
        lambda: layer.dispatch(x, ids, first=True),
        lambda: layer.dispatch(data(rank, (256, 7168), torch.float16), routing(rank, 256, 2, 4)),
        lambda: layer.combine(
            x.npu().repeat(8, 1),
            ids,
            [None, None, zeros, None, zeros, None, None],
            weights(rank, 3, 2),
        ),
        lambda: torch_npu.npu_mm_all_reduce_base(a, b, name_of(rank), reduce_op="max"),
        lambda: torch_npu.npu_mm_all_reduce_base(a, b, "nobody"),
        lambda: torch_npu.npu_all_gather_base_mm(
            a[:, :64].contiguous(), b[:64], name_of(rank), ranks
        ),
        of_variables,
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("no error")
        except Exception as error:
            texts.append(str(error)[:1000])
    total = torch.ones(1, device="npu")
    dist.all_reduce(total)
    return [texts, plain(total)]


@scenario("shared communicator", TASK_QUEUE_ENABLE="0")
def shared_communicator(rank: int, ranks: int) -> Any:
    """Collectives where dispatch was called before, and dispatch where a collective was."""
    x, ids, total = (
        data(rank, (3, 64), torch.float16),
        routing(rank, 3, 2, 4),
        torch.ones(1, device="npu"),
    )
    other = dist.new_group(list(range(ranks)))
    name = other._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    Layer(rank, ranks, 4).dispatch(x, ids)
    dist.all_reduce(total, group=other)
    dispatch = "no error"
    try:
        Layer(rank, ranks, 4, group_ep=name).dispatch(x, ids)
    except RuntimeError as error:
        dispatch = str(error)[:1000]
    dist.all_reduce(total, group=other)  # both go on
    Layer(rank, ranks, 4).dispatch(x, ids)
    sums = plain(total)
    return [dispatch, sums, failure(lambda: dist.all_reduce(total))]


@scenario("vector cores", HCCL_OP_EXPANSION_MODE="AIV", HCCL_EXEC_TIMEOUT="50")
def vector_cores(rank: int, ranks: int) -> Any:
    """A sum and a matrix product with a sum, on streams that no event orders: rank 0's wait for
    rank 1's."""
    total = torch.ones(1, device="npu")
    x = data(rank, (8, 64), torch.float16).npu()
    other = dist.new_group(list(range(ranks)))
    dist.all_reduce(total, group=other)
    torch_npu.npu_mm_all_reduce_base(x, x.t().contiguous(), name_of(rank))
    torch.npu.synchronize()
    time.sleep(3 * rank)
    work = dist.all_reduce(total, group=other, async_op=True)  # noqa: F841  # on its own stream
    return failure(lambda: torch_npu.npu_mm_all_reduce_base(x, x.t().contiguous(), name_of(rank)))


def wrong(what: str) -> Callable[[int, int], Any]:
    """The ranks disagree, or values are wrong that only the computation sees: all of them fail, and
    say why."""

    def function(rank: int, ranks: int) -> Any:
        layer, x, ids = (
            Layer(rank, ranks, 4),
            data(rank, (3, 64), torch.float16),
            routing(rank, 3, 2, 4),
        )
        scales = weights(rank, 3, 2)

        def call() -> Any:
            if what == "call" and rank:
                return dist.all_reduce(torch.ones(4, device="npu"))
            if what == "experts" and rank:
                return Layer(rank, ranks, 8).dispatch(x, ids)
            if what == "range" and rank:
                return layer.dispatch(x, ids + 3)
            if what == "twice" and rank:
                return layer.dispatch(x, ids * 0)
            if what == "mask":
                return layer.dispatch(x, ids, x_active_mask=torch.tensor([True, False, True]).npu())
            if what == "dead" and rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "late" and rank:
                time.sleep(8)
            given = layer.dispatch(x, ids)
            if what == "info":
                return layer.combine(
                    given[0],
                    ids,
                    [None, None, given[2] * 0 + 7, None, given[4], None, given[6]],
                    scales,
                )
            return None

        return timed(call)

    return function


@scenario("failed before", HCCL_EXEC_TIMEOUT="40")
def failed_before(rank: int, ranks: int) -> Any:
    """An operator of rank 1 that fails before it communicates: its tensor was freed after the
    graph's capture."""
    hcom, x1, x2 = (
        name_of(rank),
        torch.ones(1 << 14, 256).half().npu(),
        torch.ones(256, 16).half().npu(),
    )
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu.npu_mm_all_reduce_base(x1, x2, hcom)
    graph.replay()
    torch.npu.synchronize()
    if rank:
        del x1
        torch.npu.empty_cache()
    return timed(graph.replay)


for _what in ("call", "experts", "range", "twice", "mask", "dead", "late", "info"):
    scenario(f"wrong {_what}", HCCL_EXEC_TIMEOUT="3" if _what == "late" else "50")(wrong(_what))


if __name__ == "__main__":
    for each in sys.argv[1:] or SCENARIOS:
        _started = time.monotonic()
        print(json.dumps([each, play(each)]), flush=True)
        print(f"{each}: {time.monotonic() - _started:.1f} s", file=sys.stderr, flush=True)
