# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graphs of vision encoders: vLLM's EncoderCudaGraphManager on ``torch.npu``.

The manager captures the encoder once for each budget of output tokens, copies the images of a batch
into the graph's buffers, and replays it. Attention takes sequence ends from the host, where the
tensors of the batch carry them as Python attributes (``ascend_attention.encoder``). A copy into a
buffer therefore takes a tensor's attributes along.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from ascend_platform.errors import RefusedError
from ascend_platform.graph import capture_sizes
from ascend_platform.graph.acl_graph import NotReplayedError
from ascend_platform.logger import logger


class NPUEncoderGraphManager(EncoderCudaGraphManager):
    """EncoderCudaGraphManager whose graphs get the sequence ends of each batch.

    Raises:
        RefusedError: the encoder cannot be captured, in one line.
    """

    def __init__(self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any):
        check(vllm_config)
        with _refusing(model):
            super().__init__(vllm_config, device, dtype, model)
        self.config.padding_logics = {
            name: functools.partial(copy, pad) for name, pad in self.config.padding_logics.items()
        }
        count = {capture_sizes.ENCODER_GRAPHS: self.get_num_graphs_to_capture()}
        vars(vllm_config.compilation_config).update(count)

    @staticmethod
    def _copy_padded_buffer(dst: torch.Tensor, src: torch.Tensor) -> None:
        copy(EncoderCudaGraphManager._copy_padded_buffer, dst, src)

    def capture(self, graph_pool: Any) -> None:
        """Capture all budgets into a memory pool; none, with one line, if the NPU of some rank that
        shares the encoder has no stream left."""
        self.clear()
        try:
            with _refusing(self.model):
                super().capture(graph_pool)
        except capture_sizes.OutOfStreamsError as error:
            _warn("graphs of the encoder disabled: %s", str(error))
            self.clear()

    def supports_modality(self, modality: str) -> bool:
        """False without graphs, for which the V1 runner does not ask."""
        return self.is_captured() and super().supports_modality(modality)

    def _capture_budget_graph(self, *args: Any, **kwargs: Any) -> None:
        # V2 has encoders in the first pipeline stage only.
        with capture_sizes.failing_on_all_ranks(get_tp_group()):
            super()._capture_budget_graph(*args, **kwargs)

    def _run_budget_graph(
        self, mm_kwargs: dict[str, Any], token_budget: int, path: str = "default", **kwargs: Any
    ) -> torch.Tensor | None:
        """Replay a graph; images with more attention sequences than it takes are encoded eagerly."""
        try:
            return super()._run_budget_graph(mm_kwargs, token_budget, path, **kwargs)
        except NotReplayedError:
            self.graph_misses += len(self._get_item_specs(mm_kwargs))
        with torch.inference_mode():
            return self.model.encoder_eager_forward(mm_kwargs, path=path)


@contextlib.contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """Name the model, and the first line of what is raised, where its encoder cannot be captured."""
    try:
        yield
    except (RefusedError, capture_sizes.OutOfStreamsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        name = type(model).__name__
        raise RefusedError(
            f"the encoder of {name} cannot be captured in a graph: {reason}; fix: leave out"
            " cudagraph_mm_encoder"
        ) from error


def copy(
    pad: Callable[[torch.Tensor, torch.Tensor], None], buffer: torch.Tensor, new: torch.Tensor
) -> None:
    """Copy a batch's tensor into a graph's buffer, with its attributes.

    Raises:
        NotReplayedError: the buffer is too small.
    """
    if len(new) > len(buffer):
        raise NotReplayedError
    pad(buffer, new)
    for name in vars(buffer).keys() - vars(new).keys():
        delattr(buffer, name)
    vars(buffer).update(vars(new))


def check(vllm_config: Any) -> None:
    """Refuse what encoder graphs do not serve.

    Raises:
        RefusedError: in one line.
    """
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        raise RefusedError(
            "cudagraph_mm_encoder is not supported with enable_tower_connector_lora; fix: leave out"
            " one of them"
        )
    attention = op_registry_oot.get(MMEncoderAttention.__name__)
    if not getattr(attention, "in_graphs", False):
        raise RefusedError(
            "cudagraph_mm_encoder needs the vision attention of ascend-attention, which is not active"
            " here or not for this chip; fix: leave out cudagraph_mm_encoder"
        )


def is_served(model: Any) -> bool:
    """Whether vLLM can capture the model's encoder; otherwise it logs one line."""
    is_known = supports_encoder_cudagraph(model)
    if not is_known:
        _warn("cudagraph_mm_encoder: vLLM has no encoder graphs for %s", type(model).__name__)
    return is_known


@functools.cache
def _warn(text: str, detail: str) -> None:
    logger.warning(f"{text}; the encoder is run eagerly", detail)
