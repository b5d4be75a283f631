# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weight transfer from a trainer to running engines by HCCL broadcast: vLLM's weight-transfer
backend ``hccl``.

It has the interface and life cycle of vLLM's ``nccl`` backend
(``vllm/distributed/weight_transfer/nccl_engine.py``): the trainer is rank 0 of a separate group
with all workers. Parameters are sent in buffers of ``packed_buffer_size_bytes``, or one by one
without ``packed``.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.config import ParallelConfig
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import mtp_validation

from ascend_communicator.pyhccl import PyHcclCommunicator

CONNECT_SECONDS = 300.0
"""For the trainer and all workers to join the group: the timeout of vLLM's store and of its HTTP
client."""


def connect(
    address: str, port: int, rank: int, world_size: int, device: torch.device | int | None = None
) -> PyHcclCommunicator:
    """Join the trainer's group on an NPU, by default the current one, through a store at rank 0's
    address and port."""
    if device is not None:
        torch.npu.set_device(device)
    group = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world_size)
    return PyHcclCommunicator(group, torch.npu.current_device())


def bucketize(meta: Sequence[ParamMeta], max_bytes: int) -> Iterator[list[ParamMeta]]:
    """Group parameters in order into buckets of at most ``max_bytes``, or of one parameter; the
    same on both sides."""
    group: list[ParamMeta] = []
    size = 0
    for each in meta:
        if group and size + aligned_nbytes(each) > max_bytes:
            yield group
            group, size = [], 0
        group.append(each)
        size += aligned_nbytes(each)
    if group:
        yield group


def aligned_nbytes(meta: ParamMeta) -> int:
    """Bytes of a parameter in a buffer, aligned to 16."""
    return -(-torch.Size(meta.shape).numel() * meta.dtype.itemsize // 16) * 16


class _Joined:
    """A side of the transfer, which has joined the trainer's group or not yet."""

    # None or a PyHcclCommunicator, which has the methods of vLLM's PyNcclCommunicator.
    model_update_group: Any

    def shutdown(self) -> None:
        """Leave the group, which vLLM 0.31 would not destroy."""
        group, self.model_update_group = self.model_update_group, None
        if group is not None:
            group.destroy()


class HCCLWeightTransferEngine(_Joined, NCCLWeightTransferEngine):
    """Receiver in a worker."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group, and leave the one before.

        Raises:
            ValueError: the trainer sent an NCCL unique id instead of an address.
        """
        if init_info.master_address is None or init_info.master_port is None:
            raise ValueError(
                "the weight-transfer backend hccl needs master_address and master_port, not"
                " nccl_unique_id_b64"
            )
        self.shutdown()
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self._last: dict[torch.nn.Module, NCCLWeightTransferUpdateInfo] = {}
        rank = init_info.rank_offset + rank_of_worker(self.parallel_config)
        self.model_update_group = connect(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive parameters from the trainer and load them.

        From vLLM 0.33 on, an update without names has the same parameters as the last one.

        Raises:
            RuntimeError: ``init_transfer_engine`` has not been called.
        """
        if self.model_update_group is None:
            raise RuntimeError("no weight transfer group; call init_weight_transfer_engine first")
        if update_info.names:
            self._last[self.model] = update_info
        update_info = self._last.get(self.model, update_info)
        named = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        meta = [
            ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in named
        ]
        # Each of vLLM's models has `load_weights`; torch's Module does not.
        model: Any = self.model
        # A bucket has some parameters of a drafter.
        with mtp_validation.disable_mtp_completeness_check():
            for group in bucketize(meta, self.packed_buffer_size_bytes if self.packed else 0):
                buffer = torch.empty(
                    sum(map(aligned_nbytes, group)), dtype=torch.uint8, device=self.device
                )
                self.model_update_group.broadcast(buffer, 0)
                names = [each.name for each in group]
                model.load_weights(list(zip(names, unpack(buffer, group), strict=True)))


def rank_of_worker(parallel: ParallelConfig) -> int:
    """Rank among the workers of all data-parallel engines."""
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


def unpack(buffer: torch.Tensor, group: list[ParamMeta]) -> Iterator[torch.Tensor]:
    """Return views of the parameters in a buffer."""
    offset = 0
    for each in group:
        size = torch.Size(each.shape).numel() * each.dtype.itemsize
        yield buffer[offset : offset + size].view(each.dtype).view(each.shape)
        offset += aligned_nbytes(each)


@dataclass
class HCCLTrainerInitInfo(NCCLTrainerInitInfo):
    """Trainer configuration: ``rank`` among the trainer's ranks (rank 0 sends), the address of
    the group and its ``world_size``."""

    backend: ClassVar[str] = "hccl"


class HCCLTrainerWeightTransferEngine(_Joined, NCCLTrainerWeightTransferEngine):
    """Sender in the trainer: call ``trainer_init``, then ``send_weights`` after each
    training step."""

    init_info_cls = HCCLTrainerInitInfo

    @classmethod
    def trainer_init(
        cls,
        init_info: NCCLTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Create the group with the workers, which are notified through ``client``.

        Raises:
            ValueError: ``source`` is missing, or has a parameter that rank 0 does not send.
            TypeError: ``source`` has no full tensors.
            TimeoutError: a worker did not join within ``CONNECT_SECONDS``. The client's errors are
                raised at once.
        """
        if source is None:
            raise ValueError(
                "trainer_init requires a weight source, such as vLLM's ModuleSource(model)"
            )
        check_source(source)
        wire: dict[str, Any] = {
            "packed": init_info.packed,
            "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes,
        }
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, **wire)
        if engine.is_sender:
            theirs = NCCLWeightTransferInitInfo(
                master_address=init_info.master_address,
                master_port=init_info.master_port,
                rank_offset=1,
                world_size=init_info.world_size,
                **wire,
            )
            address = init_info.master_address, init_info.master_port, 0, init_info.world_size
            # returns once this rank has joined
            request = _start(client.init_weight_transfer_engine, worker_init_payload(theirs))
            joined = _start(connect, *address, torch.npu.current_device())
            try:
                done, waiting = wait((request, joined), CONNECT_SECONDS, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                if waiting:
                    raise TimeoutError(
                        f"weight transfer: the {init_info.world_size - 1} workers did not join the"
                        f" group at {address[0]} port {address[1]} in {CONNECT_SECONDS:g} s; fix:"
                        " check that vllm serve reaches this address, and world_size"
                    )
            except BaseException:
                # This rank may join later.
                joined.add_done_callback(_leave)
                raise
            engine.model_update_group = joined.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        if not self.is_sender:
            # Iterating may be a collective of the trainer's ranks.
            super()._broadcast(source, meta)
            return
        pairs = self._checked_iter(source, meta)
        for group in bucketize(meta, self.packed_buffer_size_bytes if self.packed else 0):
            buffer = torch.empty(sum(map(aligned_nbytes, group)), dtype=torch.uint8, device="npu")
            for part in unpack(buffer, group):
                part.copy_(next(pairs)[1])
            self.model_update_group.broadcast(buffer, 0)
        next(pairs, None)  # Raises if the source has more parameters than announced.

    def _post_send_sync(self) -> None:
        torch.npu.current_stream().synchronize()


def check_source(source: Any) -> None:
    """Make the checks of vLLM's ``trainer_init``, on every rank of the trainer alike: workers would
    wait for a broadcast that never begins.

    Raises:
        TypeError: the source has no full tensors.
        ValueError: another rank than 0 is the first owner of a parameter.
    """
    if not hasattr(source, "implements_iter_full"):
        return  # Before vLLM 0.33, sources have no owners, and their metadata is a method.
    if not source.implements_iter_full():
        raise TypeError(
            f"the weight-transfer backend hccl sends full tensors; {type(source).__name__} has no"
            " iter_full; fix: implement it"
        )
    for each in source.metadata:
        if each.owners is not None and each.owners[0] != 0:
            raise ValueError(
                f"the weight-transfer backend hccl sends from rank 0; the first owner of"
                f" {each.name} is rank {each.owners[0]}; fix: let the owners begin with rank 0"
            )


def _leave(joined: Future[PyHcclCommunicator]) -> None:
    if joined.exception() is None:
        joined.result().destroy()


def _start(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a daemon thread, which the process does not wait for at its end."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=call, name="ascend-weight-transfer", daemon=True).start()
    return future
