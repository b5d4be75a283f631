# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""States of linear attention and state-space layers beside pages: block tables, prompts without
their last token, transfers."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_kv_connector.config import Options, paged_block_size, sliding_windows
from ascend_kv_connector.connector import AscendP2PConnector
from ascend_kv_connector.p2p.consumer.consumer import Consumer
from ascend_kv_connector.p2p.paged_cache import Heads, PagedCache
from ascend_kv_connector.p2p.producer.producer import Producer
from ascend_kv_connector.p2p.rank import RankContext
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint
from ascend_kv_connector.p2p.scheduler.scheduler import P2PScheduler
from ascend_kv_connector.p2p.states import LAST_STATE, draft_blocks, join_tables, list_regions
from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_platform import extension
from harness.kv.memory_transport import InMemoryNetwork
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

NOTHING = SchedulerOutput.make_empty()
BLOCKS, BLOCK, HEADS, SIZE = 12, 4, 2, 6
STATES = {"recurrent": ((2, 8, 6), torch.float32), "convolution": ((3, 20), torch.bfloat16)}


class Pages(SimpleNamespace):
    """The cache of a layer with pages, as vLLM's runner passes it."""

    def _asdict(self) -> dict[str, torch.Tensor]:
        return vars(self)


def caches(
    tp: tuple[int, int] = (0, 1), block: int = BLOCK
) -> tuple[PagedCache, dict[str, torch.Tensor]]:
    """A layer with pages and two with states, of which blocks are apart, and all tensors
    by name."""
    tensors: dict[str, torch.Tensor] = {
        part: torch.zeros(BLOCKS, block, HEADS, SIZE) for part in ("key", "value")
    }
    layers: dict[str, Any] = {"pages": Pages(**tensors)}
    for layer in ("states.0", "states.1"):
        held = []
        for name, (shape, dtype) in STATES.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            memory = torch.zeros(BLOCKS, size + 64, dtype=torch.uint8)
            held.append(memory[:, :size].view(dtype).view(BLOCKS, *shape))
            tensors[f"{layer} {name}"] = held[-1]
        layers[layer] = tuple(held)
    groups = {"pages": 0, "states.0": 1, "states.1": 2}
    windows = (0, LAST_STATE, LAST_STATE)
    return (
        PagedCache(list_regions(layers, HEADS), block, Heads(0, HEADS), HEADS, groups, windows, tp),
        tensors,
    )


def test_parts_of_several_dtypes_are_bytes():
    """As int8 latents with keys of an indexer in 16 bits, and in int8 with their scales."""
    pages, layers = (BLOCKS, BLOCK, 1), dict[str, Any]()
    layers["latents"] = Pages(packed=torch.zeros(*pages, 656, dtype=torch.int8))
    layers["indexer"] = Pages(index=torch.zeros(*pages, 128, dtype=torch.bfloat16))
    scale = torch.zeros(pages, dtype=torch.float16)
    layers["int8 indexer"] = Pages(index=torch.zeros(*pages, 128, dtype=torch.int8), scale=scale)
    regions = list_regions(layers, 1)
    cache = PagedCache(regions, BLOCK, Heads(0, 1), 1)
    assert cache.dtype == torch.int8
    sizes = [(region.part, region.size) for region in cache.regions]
    assert sizes == [("packed", 656), ("index", 256), ("index", 128), ("scale", 2)]
    held = [part for layer in layers.values() for part in vars(layer).values()]
    assert [part.data_ptr() for part in held] == [part.data_ptr() for _, _, part in regions]


@pytest.fixture
def pair(network: InMemoryNetwork) -> Iterator[Callable]:
    parts: list[Any] = []

    def make(exposed: bool = True, chunk: int = 1 << 20, **shapes: Any) -> tuple[Any, ...]:
        given = {
            "transfer_timeout": 5.0,
            "answer_timeout": 2.0,
            "lease": 5.0,
            "expose_cache": exposed,
        }
        options = type("SmallOptions", (Options,), {"chunk_bytes": chunk})(**given)
        (one, there), (other, here) = (
            caches(**shapes.get("one", {})),
            caches(**shapes.get("other", {})),
        )
        producer = Producer(RankContext("p", "m"), one, network.make_transport(), options)
        consumer = Consumer(RankContext("d", "m"), other, network.make_transport(), options)
        parts.extend([consumer, producer])
        return producer, there, consumer, here

    yield make
    for part in parts:
        part.close()
    for part in parts:
        part.transport.close()


def transfer(
    producer: Producer, consumer: Consumer, leased: int, start: int, stop: int
) -> Done | Failed:
    """Transfer tokens of a prompt, in blocks 5, 6 and 7 there with states in 3 and 9, to blocks 8
    and 10, 11 and 2."""
    wide = producer.cache.block_size > BLOCK
    producer.leases.grant(
        "r", [5, 6, 0, 3, 0, 9] if wide else [5, 6, 7, 0, 0, 3, 0, 0, 9], leased, 5.0
    )
    source = Source("p", "r", ((producer.server.host, producer.server.port),))
    consumer.start("r", source, [8, 10, 0, 11, 0, 2], start, stop)
    while not (ended := consumer.get_finished()):
        pass
    return ended[0]


@pytest.mark.parametrize("chunk", [1 << 20, 700], ids=["one chunk", "a chunk a state"])
@pytest.mark.parametrize("exposed", [True, False], ids=["direct", "staged"])
def test_pages_and_last_states_are_transferred(exposed: bool, chunk: int, pair: Callable) -> None:
    producer, there, consumer, here = pair(exposed, chunk)
    torch.manual_seed(0)
    for tensor in there.values():
        tensor.copy_(torch.randn(tensor.shape))
    ended = transfer(producer, consumer, 11, 4, 11)
    assert isinstance(ended, Done), ended
    expected = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in there.items()
    }
    for part in ("key", "value"):
        expected[part][8], expected[part][10, :3] = there[part][6], there[part][7, :3]
    for layer, (one, other) in {"states.0": (3, 11), "states.1": (9, 2)}.items():
        for name in STATES:
            expected[f"{layer} {name}"][other] = there[f"{layer} {name}"][one]
    for name, tensor in here.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("exposed", [True, False], ids=["direct", "staged"])
def test_block_sizes_may_differ(exposed: bool, pair: Callable) -> None:
    producer, there, consumer, here = pair(exposed, one={"block": 8})
    torch.manual_seed(0)
    for tensor in there.values():
        tensor.copy_(torch.randn(tensor.shape))
    assert isinstance(transfer(producer, consumer, 11, 4, 11), Done)
    assert torch.equal(here["key"][8], there["key"][5, 4:])
    assert torch.equal(here["value"][10, :3], there["value"][6, :3])
    assert torch.equal(here["states.1 recurrent"][2], there["states.1 recurrent"][9])


@pytest.mark.parametrize("exposed", [True, False], ids=["direct", "staged"])
def test_the_state_of_fewer_tokens_is_refused(exposed: bool, pair: Callable) -> None:
    producer, _, consumer, here = pair(exposed)
    failed = transfer(producer, consumer, 11, 4, 10)
    assert (failed.kind, failed.cause) == (
        "mismatch",
        "invalid fetch: the state after token 10; there is that after 11",
    )
    assert all(not tensor.any() for name, tensor in here.items() if "states" in name)


def test_states_of_other_ranks_are_refused(pair: Callable) -> None:
    producer, _, consumer, _ = pair(one={"tp": (0, 2)})
    failed = transfer(producer, consumer, 11, 4, 11)
    assert (failed.kind, failed.cause) == (
        "mismatch",
        "the peer's tensor parallel size is 2, this one's 1; states need the same size",
    )


def test_states_of_other_shapes_are_refused(
    pair: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = caches()
    monkeypatch.setitem(STATES, "convolution", ((4, 20), torch.bfloat16))
    other, _ = caches()
    names = [region.part for region in one.regions]
    assert names[2:4] == ["state 0: float32 2x8x6", "state 1: bfloat16 3x20"]
    assert [region.part for region in other.regions][3] == "state 1: bfloat16 4x20"


def test_a_state_is_in_the_column_of_the_last_token() -> None:
    pages, alone, aligned, drafting = [5, 6, 7, 8], [3], [0, 0, 9], [0, 4, 2, 1]
    windows = (0, LAST_STATE, LAST_STATE)
    assert join_tables([pages, alone, aligned], windows, 0, 11, 4) == [5, 6, 7, 0, 0, 3, 0, 0, 9]
    assert join_tables([pages, [3, 2, 1], drafting], windows, 2, 11, 4) == [
        5,
        6,
        7,
        0,
        0,
        3,
        0,
        0,
        4,
    ]
    assert join_tables([pages, [], []], windows, 0, 11, 4) == [5, 6, 7, 0, 0, 0, 0, 0, 0]
    assert join_tables([[], [], []], windows, 0, 0, 4) == []
    assert join_tables([pages, [1, 2, 3, 4]], (0, 6), 0, 11, 4) == [5, 6, 7, 8, 1, 2, 3, 4]


def of_states() -> P2PScheduler:
    trusted = TrustedAddresses(metaservers=["http://r"], insecure=True)
    instance = P2PScheduler("d", CacheGroups(4, (0, LAST_STATE)), True, True, Options(), trusted)
    instance.set_endpoints({(0, 0): Endpoint("h", 1, 21)})
    return instance


def request(tokens: int, params: dict[str, Any], **sampling: Any) -> Request:
    given = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params}, **sampling)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(1, tokens + 1)),
        sampling_params=given,
        pooling_params=None,
    )


@pytest.mark.parametrize(
    ("tokens", "sampling", "kept"),
    [(12, {}, True), (1, {}, False), (12, {"prompt_logprobs": 0}, False)],
)
def test_a_prefill_instance_leaves_the_last_token_out(
    tokens: int, sampling: dict[str, int], kept: bool
) -> None:
    producer, remote = of_states(), request(tokens, {"do_remote_decode": True}, **sampling)
    producer.on_new_request(remote)
    computed = tokens - kept
    assert (remote.num_prompt_tokens, remote.num_tokens, len(remote.prompt_token_ids)) == (
        computed,
    ) * 3
    assert remote.max_tokens == (1 if kept else 8)
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, computed
    tables = producer.joined_tables(remote, ([5, 6, 7], [3]))
    offered, params = producer.request_finished(remote, tables)
    assert offered == kept
    if kept:
        assert params["remote_num_tokens"] == 11
        assert producer.build_connector_meta(NOTHING).leases == {"r": ([5, 6, 7, 0, 0, 3], 11)}
        near = request(12, params)  # The decode instance's result, with the whole prompt.
        assert producer.get_num_new_matched_tokens(near, 4) == (7, True)
        producer.update_state_after_alloc(
            near, SimpleNamespace(get_block_ids=lambda: ([50, 51, 52, 53], [60])), 7
        )
        load = producer.build_connector_meta(NOTHING).loads["r"]
        assert (load.blocks, load.start, load.stop) == ([51, 52, 0, 60], 4, 11)


def test_state_groups_are_known_and_refused_by_other_connectors() -> None:
    full = KVCacheGroupSpec(
        ["a"], FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    )
    spec = MambaSpec(
        block_size=1024, shapes=((3, 20),), dtypes=(torch.float32,), num_speculative_blocks=2
    )
    states = KVCacheGroupSpec(["b"], spec)
    assert sliding_windows("X", [states, full], states=True) == (LAST_STATE, 0)
    assert (paged_block_size([states, full]), draft_blocks([states, full])) == (16, 2)
    for groups, known, what in (
        ([states, full], False, "MambaSpec"),
        ([states], True, "has only states"),
    ):
        with pytest.raises(extension.RefusedError, match=what):
            sliding_windows("X", groups, known)


def test_push_is_refused() -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"mode": "push", "insecure": True}
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(is_hybrid=True),
    )
    with pytest.raises(
        extension.RefusedError,
        match=r'layer by layer; fix: remove kv_connector_extra_config\.mode "push"',
    ):
        AscendP2PConnector.check_config(config)
    config.model_config.is_hybrid = False
    AscendP2PConnector.check_config(config)
