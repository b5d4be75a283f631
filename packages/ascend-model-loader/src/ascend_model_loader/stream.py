"""Local checkpoints read by several threads: Run:ai's model streamer where it is installed, else vLLM's own threads."""

import importlib.util
import os
import time
from collections.abc import Iterator

import torch
from vllm.config import replace
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import runai_safetensors_weights_iterator

from ascend_model_loader.options import Options


class RunaiLoader(DefaultModelLoader):
    """vLLM's default loader, whose choice of files and checks it has, with Run:ai's streamer to read safetensors.

    vLLM's load format ``runai_streamer`` has neither: it leaves out the files of secondary weights, and does not see that a
    parameter has got none (``vllm/model_executor/model_loader/runai_streamer_loader.py``).
    """

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
        given = (source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides)
        _, files, are_safetensors, _ = self._prepare_weights(*given)
        if not are_safetensors:
            raise ValueError("the checkpoint has no safetensors files, which alone are streamed")
        self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
        weights = runai_safetensors_weights_iterator(files, self.load_config.use_tqdm_on_load)
        return ((source.prefix + name, tensor) for name, tensor in weights)


def default_loader(load_config: LoadConfig) -> DefaultModelLoader:
    """vLLM's default loader, as ``--load-format auto`` has it."""
    return DefaultModelLoader(replace(load_config, load_format="auto", model_loader_extra_config={}))


def streaming_loader(options: Options, load_config: LoadConfig) -> DefaultModelLoader:
    """The streaming loader that the options ask for.

    Raises:
        ImportError: Run:ai's streamer is asked for by name and is not installed.
    """
    there = importlib.util.find_spec("runai_model_streamer") is not None
    if options.stream == "runai_streamer" and not there:
        raise ImportError("stream is runai_streamer, which is not installed; run: pip install 'ascend-model-loader[runai]'")
    given = {"load_format": "auto", "safetensors_load_strategy": None}
    if there and options.stream != "multithread":
        os.environ.setdefault("RUNAI_STREAMER_CONCURRENCY", str(options.stream_threads))
        return RunaiLoader(replace(load_config, model_loader_extra_config={}, **given))
    threads = {"enable_multithread_load": True, "num_threads": options.stream_threads}
    return DefaultModelLoader(replace(load_config, model_loader_extra_config=threads, **given))
