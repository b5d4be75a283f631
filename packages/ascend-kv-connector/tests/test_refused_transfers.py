# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers and messages that an instance refuses."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from ascend_kv_connector.p2p.protocol import (
    CODEC,
    Ack,
    Confirm,
    Fetch,
    Locate,
    Located,
    Pushed,
    Refused,
)
from ascend_kv_connector.p2p.transfers import Done
from ascend_kv_connector.p2p.worker import model_fingerprint
from transformers import PretrainedConfig


def test_tokens_outside_a_window_are_refused(instances: Callable) -> None:
    producer, consumer = (
        instances("p", windows=(0, 6)).produce(),
        instances("d", windows=(0, 20)).consume(),
    )
    source, _ = producer.fill("r", 30)
    consumer.consumers[0].start("r", source, consumer.take(30), 0, 30)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "lease"
    assert outcome.cause.startswith("some of tokens 8 to 30 have left the window of 6")


def test_single_group_cannot_read_from_several_groups(instances: Callable) -> None:
    producer, consumer = instances("p", windows=(0, 6)).produce(), instances("d").consume()
    source, _ = producer.fill("r", 30)
    consumer.consumers[0].start("r", source, consumer.take(30), 0, 30)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "mismatch"
    assert "give both instances --disable-hybrid-kv-cache-manager or neither" in outcome.cause


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"total_heads": 2}, "int16 with 4 heads, this one int16 with 2"),
        ({"layers": 3}, "layers.2"),
    ],
)
def test_mismatched_caches_are_refused(other: dict, cause: str, instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d", **other).consume()
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert failed.kind == "mismatch"
    assert cause in failed.cause


def test_mismatched_model_and_engine_are_refused(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume(model="n")
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert "the peer serves m by memory, this instance n" in failed.cause
    consumer.consumers[0].start("r", source._replace(engine="q"), consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert failed.kind == "peer"
    assert "engine p listens at this address instead of engine q" in failed.cause


def config(additional: Any = None, cache: str = "auto", **model: Any) -> Any:
    """The parts of a VllmConfig that the KV cache of a Phi-3 depends on."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    hf = PretrainedConfig(architectures=["Phi3ForCausalLM"])
    hf.rope_parameters = rope
    common = {"quantization": None, "dtype": torch.bfloat16, "max_model_len": 4096}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf, **common | model),
        cache_config=SimpleNamespace(cache_dtype=cache),
        additional_config=additional or {},
    )


def test_options_that_change_the_kv_cache_are_refused() -> None:
    """Of equal shape, dtype and bytes: vLLM rotates keys with other factors beyond 4,096 tokens."""
    same = [config(), config(max_model_len=1024), config(cache="bfloat16")]
    other = [
        config(quantization="fp8"),
        config(max_model_len=8192),
        config(dtype=torch.float16, cache="bfloat16"),
        config(cache="int8"),
    ]
    first, *more = map(model_fingerprint, [*same, *other])
    assert [each == first for each in more] == [True, True, False, False, False, False]


def test_rotated_keys_in_another_order_are_refused(instances: Callable) -> None:
    """Their KV caches have the same shapes."""
    on = {"ascend": {"platform": {"mla_prolog": True}}}
    pairs, halves = (model_fingerprint(config(additional=given)) for given in ({}, on))
    assert halves == f"{pairs}/rope in halves"
    producer, consumer = instances("p").produce(model=pairs), instances("d").consume(model=halves)
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.cause) == (
        "mismatch",
        f"the peer serves {pairs} by memory, this instance {halves} by memory",
    )


def test_other_weights_of_the_same_model_are_refused(instances: Callable) -> None:
    """For an instance without the checkpoint's files, whose fingerprint is unknown, only the model
    is compared."""
    for theirs, ours, cause in (
        ("new", "old", "the peer's weights of m have fingerprint new, this instance's old"),
        ("new", "new", ""),
        ("", "old", ""),
    ):
        producer, consumer = (
            instances("p", weights=theirs).produce(),
            instances("d", weights=ours).consume(),
        )
        source, _ = producer.fill("r", 8)
        consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
        ((outcome,),) = consumer.wait()
        assert (
            (outcome.kind, outcome.cause) == ("mismatch", cause)
            if cause
            else isinstance(outcome, Done)
        )


INVALID: dict[str, Any] = {
    "chunk_bytes": 0,
    "block_size": 0,
    "block_tokens": -1,
    "heads": 0,
    "first_head": -1,
    "total_heads": 2**62,
    "tp": (5, 0),
    "memory": [(8, 8)],
    "regions": [],
    "dtype": "int16\nx\x1b[31m" * 200,
}
NONSENSE: dict[str, Any] = {
    "no blocks": {Locate: Located(1, [])},
    "negative blocks": {Locate: Located(1, [-5] * 2)},
    "more blocks": {Locate: Located(1, [*range(1000)])},
    "blocks that overflow": {Locate: Located(1, [2**62] * 2)},
    "no location": {Locate: Ack()},
    "no confirmation": {Confirm: Pushed(3)},
    "unknown error code": {Locate: Refused("code\n", "cause\x1b[2J" * 1000)},
}


@pytest.mark.parametrize("case", [*INVALID, *NONSENSE])
def test_invalid_answers_of_a_peer_are_a_mismatch(instances: Callable, case: str) -> None:
    """They are no defects of this wheel that a user should report."""
    producer, consumer = instances("p").produce(), instances("d").consume()
    rank = producer.producers[0]
    if case in INVALID:
        rank._cache_info = msgspec.structs.replace(rank._cache_info, **{case: INVALID[case]})
    answers = NONSENSE.get(case, {})
    rank.server._handler = lambda query: answers.get(type(query)) or rank.answer(query)
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, "bug" in outcome.hint) == ("mismatch", False), outcome
    assert str(outcome).isprintable()
    assert len(str(outcome)) < 1000


def test_fetch_outside_the_lease_is_refused(instances: Callable) -> None:
    producer = instances("p").produce()
    producer.fill("r", 8)
    rank = producer.producers[0]
    good = {
        "request": "r",
        "reader": "x",
        "rank": 0,
        "transfer": "n",
        "start": 0,
        "stop": 2,
        "regions": [0],
        "first_head": 0,
        "heads": 1,
    }
    assert not isinstance(rank.answer(Fetch(**good)), Refused)
    bad_ones = [
        {"stop": 9},
        {"start": -1},
        {"start": 2},
        {"regions": [4]},
        {"regions": [-1]},
        {"regions": []},
    ]
    bad_ones += [{"heads": 5}, {"first_head": 4}, {"heads": 0}]
    for bad in bad_ones:
        with pytest.raises(Exception, match="invalid fetch"):
            rank.answer(Fetch(**(good | bad)))


def test_malformed_messages_are_refused(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    server, draw = producer.producers[0].server, random.Random(0)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://{server.host}:{server.port}")
    for _ in range(200):
        socket.send_multipart(
            [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 5))]
        )
    nested = b"\x82\xa4type\xa9Handshake\xa4more" + b"\x91" * 100_000 + b"\xc0"
    for malformed in (b"\x81\xa4type\xa9Handshake", b"\x81\xa4type\xa1\xff", nested):
        socket.send_multipart([b"1", malformed])
        assert socket.poll(2000)
        assert isinstance(CODEC.decode_reply(socket.recv_multipart()[-1]), Refused)
        with pytest.raises(msgspec.DecodeError):
            CODEC.decode_reply(malformed)
    context.destroy(linger=0)
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)
