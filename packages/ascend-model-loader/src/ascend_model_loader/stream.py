# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Multi-threaded reading of local checkpoints: Run:ai's model streamer if it is installed,
otherwise vLLM's thread pool."""

import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.config import replace
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import runai_safetensors_weights_iterator

from ascend_model_loader.options import Options

PREFETCHED_TENSORS = 4
"""Tensors that are pinned ahead of the one being loaded."""


class RunaiLoader(DefaultModelLoader):
    """vLLM's default loader with Run:ai's streamer to read safetensors files.

    vLLM's load format ``runai_streamer`` skips the files of secondary weights and does not check
    that every parameter was loaded (``vllm/model_executor/model_loader/runai_streamer_loader.py``);
    the default loader does both.
    """

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Iterator[tuple[str, torch.Tensor]]:
        _, files, are_safetensors, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if not are_safetensors:
            raise ValueError("the checkpoint has no safetensors files; streaming needs them")
        self.counter_before_loading_weights = (
            self.counter_before_loading_weights or time.perf_counter()
        )
        weights = runai_safetensors_weights_iterator(files, self.load_config.use_tqdm_on_load)
        return ((source.prefix + name, tensor) for name, tensor in weights)


class PinnedLoader(DefaultModelLoader):
    """vLLM's default loader, or the next class in the MRO, through pinned host memory, which an NPU
    reads by DMA."""

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return pin_weights(super()._get_weights_iterator(source), torch.npu.current_device())


class PinnedRunaiLoader(PinnedLoader, RunaiLoader):
    """Run:ai's streamer through pinned host memory."""


def pin_weights(
    weights: Iterator[tuple[str, torch.Tensor]], device: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy weights to pinned host memory on a background thread, ``PREFETCHED_TENSORS`` ahead.

    The caller may keep the tensors: pinned memory is reused only when nothing refers to it.
    """

    def pin_next() -> tuple[str, torch.Tensor] | None:
        if (item := next(weights, None)) is None:
            return None
        return item[0], item[1].pin_memory()

    with ThreadPoolExecutor(1, "pin", lambda: torch.npu.set_device(device)) as thread:
        ahead = deque(thread.submit(pin_next) for _ in range(PREFETCHED_TENSORS))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(pin_next))
            yield item


def default_loader(load_config: LoadConfig) -> DefaultModelLoader:
    """vLLM's default loader, as for ``--load-format auto``."""
    return DefaultModelLoader(
        replace(load_config, load_format="auto", model_loader_extra_config={})
    )


def streaming_loader(options: Options, load_config: LoadConfig) -> DefaultModelLoader:
    """The streaming loader selected by the options.

    Raises:
        ImportError: Run:ai's streamer is requested explicitly and is not installed.
    """
    installed = importlib.util.find_spec("runai_model_streamer") is not None
    if options.stream == "runai_streamer" and not installed:
        raise ImportError(
            "stream is runai_streamer, which is not installed; fix: pip install"
            " 'ascend-model-loader[runai]'"
        )
    load_config = replace(load_config, load_format="auto", safetensors_load_strategy=None)
    if installed and options.stream != "multithread":
        os.environ.setdefault("RUNAI_STREAMER_CONCURRENCY", str(options.stream_threads))
        kind: type[DefaultModelLoader] = PinnedRunaiLoader if options.stream_pinned else RunaiLoader
        return kind(replace(load_config, model_loader_extra_config={}))
    threads = {"enable_multithread_load": True, "num_threads": options.stream_threads}
    kind = PinnedLoader if options.stream_pinned else DefaultModelLoader
    return kind(replace(load_config, model_loader_extra_config=threads))
