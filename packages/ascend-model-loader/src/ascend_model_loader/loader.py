# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Load format ``ascend_peer``: a chain of strategies. Each loads all weights or falls back to the
next one."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ascend_platform import extension
from ascend_transfer.checkpoint import loaded_fingerprint, note_files
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ascend_model_loader import identity, options, peer, registry, server, stream
from ascend_model_loader.chunks import (
    byte_view,
    chunk_digests,
    chunk_layout,
    is_plain,
    named_tensors,
)
from ascend_model_loader.report import Report
from ascend_model_loader.wire import PeerError

logger = extension.logger

UNCHANGED_BY_PROCESSING = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Quantize methods whose ``process_weights_after_loading`` leaves the weights unchanged."""


class PeerModelLoader(BaseModelLoader):
    """Model loader that reads weights from a peer, from a streamer or by vLLM's default loader, and
    optionally serves them.

    Transferred are the weights as ``load_weights`` made them, before
    ``process_weights_after_loading``: that step stores derived values outside the state dict
    (absorbed projections, scales as Python numbers), so each engine runs it itself.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.options = options.parse_options(load_config.model_loader_extra_config)
        self.report = Report()
        self._vllm_config: VllmConfig | None = None
        self._identity: dict[str, str] = {}
        self._loaded: Snapshot | None = None

    def download_model(self, model_config: ModelConfig) -> None:
        stream.default_loader(self.load_config).download_model(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights of the checkpoint, for ``reload_weights``."""
        return stream.default_loader(self.load_config).get_all_weights(model_config, model)

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Load the model as vLLM does, log the table of phases, and start the weight server if
        ``serve_weights`` is set."""
        # A drafter is loaded with the same options, but they describe the target model's weights.
        self._vllm_config = vllm_config if is_target(vllm_config, model_config) else None
        with self.report.phase("total, including model construction"):
            model = super().load_model(vllm_config, model_config, prefix)
        if self._loaded and self._vllm_config:
            self._serve(self._loaded, model, self._vllm_config)
        logger.info("weights of %s loaded\n%s", model_config.model, self.report.table())
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights by the first strategy that succeeds.

        Raises:
            RuntimeError: all strategies failed; the message has each one's reason.
        """
        serving = self.options.serve_weights and self._vllm_config is not None
        before = scalar_attributes(model) if serving else {}
        if self._vllm_config and (serving or self.options.peers or self.options.registry):
            # Must run before weight processing, which may change the model's configuration (vLLM's
            # weight_cache/daemon.py).
            note_files(model_config)
            self._identity = identity.weight_identity(
                self._vllm_config, model_config, self.options.name
            )
        reasons: list[str] = []
        for strategy in self.options.strategies:
            try:
                known_digests = getattr(self, f"_by_{strategy}")(model, model_config)
                break
            except Exception as error:
                kind = "" if isinstance(error, PeerError) else f"{type(error).__name__}: "
                reasons.append(f"{strategy}: {kind}{error}")
                following = self.options.strategies[len(reasons) :]
                fallback = f"; falling back to: {following[0]}" if following else ""
                if strategy != "peer" or self.options.peers or self.options.registry:
                    logger.warning(
                        "cannot load weights by %s%s", " ".join(reasons[-1].split()), fallback
                    )
                if strategy != "peer" and any(each.is_meta for each in model.parameters()):
                    raise  # Weights that are quantized during loading cannot be loaded again.
        else:
            raise RuntimeError(
                f"no strategy could load the weights of {model_config.model}: {'; '.join(reasons)}"
            )
        if serving:
            self._take_snapshot(
                model, before, known_digests, None if strategy == "peer" else model_config
            )

    # Strategies. Each returns the chunk digests of the loaded weights, if it knows them.

    def _by_peer(self, model: nn.Module, model_config: ModelConfig) -> list[bytes] | None:
        if self._vllm_config is None:
            raise PeerError("a drafter's weights are not loaded from peers")
        ours = self._identity
        # Data-parallel engines differ only in their experts.
        offset = _worker_rank(self._vllm_config, within_engine=not model_config.is_moe)
        listed = [
            (host, port + offset) for host, port in map(options.parse_address, self.options.peers)
        ]

        def find() -> list[tuple[str, int]]:
            return listed + self._registered_peers(ours)

        if not find():
            raise PeerError("no peer is given, and the registry has none with these weights")
        tensors, secret = named_tensors(model), options.read_secret(self.options)
        device = next(iter(tensors.values())).device
        manifest, (host, port) = peer.Fetch(
            tensors, ours, self.options, secret, device, self.report
        ).from_first(find)
        logger.info("weights loaded from peer %s:%d", host, port)
        return manifest.digests if manifest.checksum == self.options.checksum else None

    def _registered_peers(self, ours: Mapping[str, str]) -> list[tuple[str, int]]:
        """Addresses in the registry, the engine that began to serve last first."""
        addresses: list[tuple[str, int]] = []
        if not self.options.registry:
            return addresses
        for each in registry.find(self.options.registry, identity.registry_key(ours)):
            with contextlib.suppress(extension.RefusedError):  # not an address
                addresses.append(options.parse_address(each))
        return addresses

    def _by_stream(self, model: nn.Module, model_config: ModelConfig) -> None:
        loader = stream.streaming_loader(self.options, self.load_config)
        reader = "runai_streamer" if isinstance(loader, stream.RunaiLoader) else "threads"
        with self.report.phase(f"streamed by {reader}") as phase:
            loader.load_weights(model, model_config)
            phase.bytes = _parameter_bytes(model)

    def _by_default(self, model: nn.Module, model_config: ModelConfig) -> None:
        with self.report.phase("vLLM's default loader") as phase:
            stream.default_loader(self.load_config).load_weights(model, model_config)
            phase.bytes = _parameter_bytes(model)

    # Serving

    def _take_snapshot(
        self,
        model: nn.Module,
        before: Mapping[str, str],
        known_digests: list[bytes] | None,
        from_files: ModelConfig | None,
    ) -> None:
        try:
            if from_files is not None:
                loaded_fingerprint(from_files)
            if changed := sorted(set(scalar_attributes(model).items()) - set(before.items())):
                raise PeerError(
                    f"load_weights set an attribute that is not a tensor: {changed[0][0]}"
                )
            with self.report.phase("checksums for peers") as phase:
                self._loaded = Snapshot(model, self.options.checksum, known_digests)
                phase.bytes = 0 if known_digests else self._loaded.size
        except (PeerError, extension.RefusedError) as error:
            logger.warning("weights are not served: %s", error)

    def _serve(self, loaded: "Snapshot", model: nn.Module, vllm_config: VllmConfig) -> None:
        try:
            loaded.release_unchanged(model)
            weight_server = server.WeightServer(
                loaded.tensors,
                loaded.digests,
                self._identity,
                self.options,
                options.read_secret(self.options),
                loaded.device,
                _worker_rank(vllm_config),
            )
            server.publish(weight_server)
        except (PeerError, OSError, OverflowError) as error:
            logger.warning("weights are not served: %s", error)


class Snapshot:
    """A model's weights as loaded: tensors on the device, and host copies of those that processing
    is going to replace.

    Args:
        checksum: name of a function in ``chunks.CHECKSUMS``.
        known_digests: digests of the chunks, if they are already known.

    Raises:
        PeerError: a tensor has no storage of its own that could be sent.
    """

    def __init__(
        self, model: nn.Module, checksum: str, known_digests: list[bytes] | None = None
    ) -> None:
        named = named_tensors(model)
        processed = {
            f"{name}.{tensor}".lstrip(".")
            for name, module in model.named_modules()
            if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase)
            and type(method) not in UNCHANGED_BY_PROCESSING
            for tensor in module.state_dict()
        }
        self.device = next((each.device for each in named.values()), torch.device("cpu"))
        self.host_copies = {
            name: torch.empty(each.shape, dtype=each.dtype).copy_(each.detach())
            for name, each in named.items()
            if name in processed or not is_plain(each)
        }
        self._storage_keys = {name: _storage_key(each) for name, each in named.items()}
        self.tensors: dict[str, torch.Tensor] = named | self.host_copies
        self.size = chunk_layout(self.tensors).total
        self.digests = known_digests or chunk_digests(self.tensors, checksum, self.device)

    def release_unchanged(self, model: nn.Module) -> None:
        """Drop host copies of tensors that processing left unchanged, and serve those from the
        device.

        Raises:
            PeerError: processing changed a tensor without a host copy.
        """
        after = named_tensors(model)
        for name, storage in self._storage_keys.items():
            live = after.get(name)
            if live is None or _storage_key(live) != storage:
                if name not in self.host_copies:
                    raise PeerError(
                        f"process_weights_after_loading replaced {name}, of which there is no host"
                        " copy"
                    )
            elif (
                name in self.host_copies
                and is_plain(live)
                and torch.equal(byte_view(live).cpu(), byte_view(self.host_copies[name]))
            ):
                self.tensors[name] = live
                del self.host_copies[name]


def is_target(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Whether a model is the target, not a drafter. A drafter is loaded with the
    configurations of the target and of its own model, or, by the method ``draft_model``, only with
    its own."""
    return model_config is vllm_config.model_config and model_config.runner_type != "draft"


def _storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _parameter_bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def _worker_rank(vllm_config: VllmConfig, *, within_engine: bool = False) -> int:
    """Rank of this worker across all data-parallel engines, which serve at their own ports, or
    within its engine."""
    parallel = vllm_config.parallel_config
    # its world has all engines' ranks
    together = parallel.distributed_executor_backend == "external_launcher"
    size = parallel.world_size // (parallel.data_parallel_size if together else 1)
    return int(parallel.rank % size + (0 if within_engine else parallel.data_parallel_index * size))


def scalar_attributes(model: nn.Module) -> dict[str, str]:
    """Numbers, strings and booleans among the attributes of a model's modules."""
    return {
        f"{name}.{key}": repr(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }
