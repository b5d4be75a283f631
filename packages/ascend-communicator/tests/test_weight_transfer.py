# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Connecting a trainer and the workers: the first error ends it, and there is a deadline."""

import functools
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_communicator import weight_transfer
from ascend_communicator.pyhccl import PyHcclCommunicator
from harness.engines.ports import free_port
from torch.distributed import TCPStore
from vllm.config import ParallelConfig
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import mtp_validation


class Client:
    """A server's answer to init_weight_transfer_engine."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.answer = answer

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.answer()


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(client: Client, port: int, world_size: int = 2) -> None:
    given = weight_transfer.HCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=port, world_size=world_size
    )
    source = ModuleSource(torch.nn.Linear(2, 2))
    weight_transfer.HCCLTrainerWeightTransferEngine.trainer_init(
        given, client=client, source=source
    )  # type: ignore[arg-type]


def test_error_of_the_server_does_not_wait_for_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "5")

    def refuse() -> None:
        raise ConnectionError("the server is down")

    with pytest.raises(ConnectionError, match="the server is down"):
        connect(Client(refuse), free_port())


def test_error_of_the_group_does_not_wait_for_the_server(
    forever: threading.Event, listening: socket.socket
) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="in use"):
        connect(Client(lambda: _wait(forever)), listening.getsockname()[1])
    assert time.monotonic() - began < 60


def test_group_that_the_server_refuses_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = threading.Event()
    groups: list[PyHcclCommunicator] = []

    def join(*given: Any) -> PyHcclCommunicator:
        groups.append(plain_connect(*given))
        joined.set()
        return groups[0]

    def refuse() -> None:
        assert joined.wait(60)
        raise ConnectionError("the server is down")

    plain_connect = weight_transfer.connect
    monkeypatch.setattr(weight_transfer, "connect", join)
    with pytest.raises(ConnectionError, match="the server is down"):
        connect(Client(refuse), free_port(), world_size=1)
    assert is_destroyed(groups[0])


def test_worker_destroys_the_group_that_it_leaves() -> None:
    engine = object.__new__(weight_transfer.HCCLWeightTransferEngine)
    engine.parallel_config = ParallelConfig()
    engine.model_update_group = None
    groups: list[PyHcclCommunicator] = []
    for _ in range(2):
        engine.init_transfer_engine(
            NCCLWeightTransferInitInfo(
                master_address="127.0.0.1", master_port=free_port(), rank_offset=0, world_size=1
            )
        )
        groups.append(engine.model_update_group)
    assert is_destroyed(groups[0])
    engine.shutdown()
    assert engine.model_update_group is None
    assert is_destroyed(groups[1])
    engine.shutdown()


@pytest.mark.skipif(
    not hasattr(WeightSource, "iter_local"), reason="sources have owners from vLLM 0.33 on"
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("mode", "owner", "raised", "message"),
    [
        (
            "iter_local",
            0,
            TypeError,
            (
                "the weight-transfer backend hccl sends full tensors; Source has no iter_full; fix:"
                " implement it"
            ),
        ),
        (
            "iter_full",
            1,
            ValueError,
            (
                "the weight-transfer backend hccl sends from rank 0; the first owner of weight is"
                " rank 1; fix: let the owners begin with rank 0"
            ),
        ),
    ],
)
def test_sources_that_rank_0_cannot_send_are_refused(
    rank: int, mode: str, owner: int, raised: type[Exception], message: str
) -> None:
    """Before the workers are told to join, as by vLLM."""

    def refuse() -> None:
        raise AssertionError("the workers are told to join")

    class Source(WeightSource):
        @functools.cached_property
        def metadata(self) -> Any:
            owners: dict[str, Any] = {"owners": (owner, 2)}
            return [ParamMeta("weight", torch.float32, (2,), **owners)]

    setattr(Source, mode, lambda self: iter([("weight", torch.ones(2))]))
    for engine in (
        weight_transfer.HCCLTrainerWeightTransferEngine,
        NCCLTrainerWeightTransferEngine,
    ):
        given = weight_transfer.HCCLTrainerInitInfo(
            rank=rank, master_address="127.0.0.1", master_port=free_port(), world_size=2
        )
        with pytest.raises(raised) as caught:
            engine.trainer_init(given, client=Client(refuse), source=Source())
        if engine is weight_transfer.HCCLTrainerWeightTransferEngine:
            assert str(caught.value) == message


def is_destroyed(group: PyHcclCommunicator) -> bool:
    """Whether it refuses a collective within ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            group.broadcast(torch.zeros(1, device="npu"), 0)
        except RuntimeError as error:
            return "has been destroyed" in str(error)
        time.sleep(0.1)
    return False


class Pickled:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_worker_unpickles_nothing_of_the_trainer(tmp_path: Path) -> None:
    """A worker's API names any address as that of the trainer."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, world_size=2, is_master=True, wait_for_workers=False)
    for key in ("broadcast_from/0/0", "broadcast_tensor/0/0", "send_to/1/0", "hccl_root_info/0"):
        store.set(key, pickle.dumps(Pickled(tmp_path / "executed")))
    with pytest.raises(
        RuntimeError, match=r"sent \d+ bytes of root information; HCCL's has 4108; fix: "
    ):
        weight_transfer.connect("127.0.0.1", port, 1, 2)
    assert not (tmp_path / "executed").exists()


def test_deadline(forever: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "5")
    monkeypatch.setattr(weight_transfer, "CONNECT_SECONDS", 1.0)
    with pytest.raises(
        TimeoutError,
        match=r"the 1 workers did not join the group at 127\.0\.0\.1 port .* in 1 s; fix: check",
    ):
        connect(Client(lambda: _wait(forever)), free_port())


def test_update_without_parameters_uses_those_of_the_last_update() -> None:
    """A transfer as vLLM's trainer sends it from 0.33 on, in buckets that each have some of a
    drafter's parameters."""
    loaded: list[list[str]] = []

    class Model(torch.nn.Module):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            assert not mtp_validation.is_mtp_completeness_check_enabled()
            loaded.append([name for name, _ in weights])

    engine = object.__new__(weight_transfer.HCCLWeightTransferEngine)
    engine.model, engine.device, engine._last = Model(), torch.device("npu"), {}
    engine.packed, engine.packed_buffer_size_bytes = True, 32
    engine.model_update_group = SimpleNamespace(broadcast=lambda buffer, _: buffer.zero_())
    named = NCCLWeightTransferUpdateInfo(
        names=["a", "b", "c"], dtype_names=["float32"] * 3, shapes=[[4]] * 3
    )
    for update in (named, NCCLWeightTransferUpdateInfo(names=[], dtype_names=[], shapes=[])):
        engine.receive_weights(update)
    assert loaded == [["a", "b"], ["c"]] * 2


def test_trainer_ranks_that_do_not_send_materialize_parameters() -> None:
    """As the sender does: that is a collective of the trainer's ranks."""
    materialized: list[str] = []

    class Parameter(torch.nn.Parameter):
        def full_tensor(self) -> torch.Tensor:  # of a DTensor
            materialized.append("x")
            return self.data

    model = torch.nn.Module()
    model.weight = Parameter(torch.ones(2, device="npu"))
    trainer = weight_transfer.HCCLTrainerWeightTransferEngine(
        client=Client(lambda: None),  # type: ignore[arg-type]
        source=ModuleSource(model),
        is_sender=False,
    )
    trainer.send_weights()
    assert materialized == ["x"]


def _wait(event: threading.Event) -> None:
    event.wait(120)
