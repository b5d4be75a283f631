# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4's MTP: a decoder layer after the model's own, which drafts the token after the next
one from the model's streams and the embedding of the next token.

vLLM's forms of it are for named devices. Embeddings and the projection to the vocabulary are the
model's own, which vLLM's drafter sets; checkpoints may have copies of them.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mhc import HCHeadOp
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.deepseek_mtp import SharedHead
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.models.deepseek_v4.cpu import model as cpu_form

import ascend_models
from ascend_models.deepseek_v4.attention import SINKS

COPIES = ("emb.", "head.")
"""Of the model's embeddings and projection to the vocabulary."""
OWN = {
    **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm")},
    **{f"hc_head_{name}": f"hc_head_{name}" for name in ("fn", "base", "scale")},
    "norm.weight": "shared_head.norm.weight",
}
"""Tensors of neither the decoder layer nor the two projections: name in the checkpoint, and here."""
PROJECTIONS = ("e_proj.", "h_proj.")
REPLACED = ("embed_tokens.weight", "shared_head.head.weight")
"""Parameters that the drafter of vLLM replaces by those of the model."""


class PredictorLayer(torch.nn.Module):
    """Parameters as in vLLM's DeepSeekV4MultiTokenPredictorLayer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.streams, self.hc_eps = config.hc_mult, config.hc_eps
        self.enorm, self.hnorm = RMSNorm(hidden, self.eps), RMSNorm(hidden, self.eps)
        named: dict[str, Any] = {"bias": False, "return_bias": False, "quant_config": quant_config}
        self.e_proj = ReplicatedLinear(hidden, hidden, prefix=f"{prefix}.e_proj", **named)
        self.h_proj = ReplicatedLinear(hidden, hidden, prefix=f"{prefix}.h_proj", **named)
        shapes = {"fn": (self.streams, self.streams * hidden), "base": (self.streams,)}
        for name, shape in (shapes | {"scale": (1,)}).items():
            parameter = torch.nn.Parameter(
                torch.empty(shape, dtype=torch.float32), requires_grad=False
            )
            self.register_parameter(f"hc_head_{name}", parameter)
        self.hc_head_op = HCHeadOp()
        self.shared_head = SharedHead(config=config, prefix=prefix, quant_config=quant_config)
        self.mtp_block = cpu_form.DeepseekV4DecoderLayer(vllm_config, prefix)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        streams: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """The streams after the layer, ``[tokens, streams * hidden]``.

        Args:
            input_ids: ``[tokens]``, for each position the token after it.
            positions: int64 ``[tokens]``.
            streams: the streams of the positions, as the result.
            embeddings: of ``input_ids``, ``[tokens, hidden]``.
        """
        # The layer was trained without the embedding of the first position.
        known = embeddings.masked_fill((positions == 0).unsqueeze(-1), 0)
        before = self.hnorm(streams.unflatten(-1, (self.streams, -1)).contiguous())
        joined = self.h_proj(before) + self.e_proj(self.enorm(known)).unsqueeze(-2)
        return self.mtp_block(joined, positions, input_ids)[0].flatten(1)

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """The normalized hidden states that logits are computed of, ``[tokens, hidden]``."""
        hidden = self.hc_head_op(
            streams.unflatten(-1, (self.streams, -1)),
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            self.eps,
            self.hc_eps,
        )
        return self.shared_head.norm(hidden)


class Predictor(torch.nn.Module):
    """The MTP layers, which draft tokens in turn."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.first, self.count = self.config.num_hidden_layers, self.config.num_nextn_predict_layers
        self.layers = torch.nn.ModuleDict(
            {
                str(index): PredictorLayer(vllm_config, f"{prefix}.layers.{index}")
                for index in range(self.first, self.first + self.count)
            }
        )
        self.embed_tokens = VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            prefix=maybe_prefix(prefix, "embed_tokens"),
        )
        self.is_fused_shared_expert_enabled = False  # for get_expert_mapping()

    def layer(self, step: int) -> Any:
        return self.layers[str(self.first + step % self.count)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return cpu_form.DeepseekV4Model.load_weights(cast(Any, self), weights)

    def get_expert_mapping(self) -> Any:
        return cpu_form.DeepseekV4Model.get_expert_mapping(cast(Any, self))


class DeepSeekV4MTP(torch.nn.Module):
    """DeepSeek-V4's drafter for ``--speculative-config '{"method": "mtp", ...}'``."""

    packed_modules_mapping = cpu_form.DeepseekV4ForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ascend_models.install_overrides("deepseek_v4")
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model = Predictor(vllm_config, maybe_prefix(prefix, "model"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """See :meth:`PredictorLayer.forward`."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        layer = self.model.layer(spec_step_idx)
        return layer(input_ids, positions, hidden_states, inputs_embeds)

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        """Logits ``[tokens, vocabulary]`` of the streams that :meth:`forward` returns."""
        layer = self.model.layer(spec_step_idx)
        return self.logits_processor(layer.shared_head.head, layer.collapse(hidden_states))

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is of no layer of the drafter; vLLM skips it."""
        return not name.startswith("mtp.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``mtp.N.*`` of a checkpoint in the published names.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        experts = getattr(self.config, "expert_dtype", "fp4")
        own = ((renamed, tensor) for name, tensor in weights if (renamed := self._rename(name)))
        loaded = AutoWeightsLoader(self).load_weights(
            own, mapper=cpu_form._make_deepseek_v4_weights_mapper(experts) | SINKS
        )
        if not loaded:
            raise ValueError(
                "the checkpoint has no tensors of MTP layers (mtp.0.*); fix: leave"
                " --speculative-config out, or take a checkpoint with them"
            )
        names = (name for name, _ in self.named_parameters())
        return loaded | {name for name in names if name.endswith(REPLACED)}

    def _rename(self, name: str) -> str:
        """Our name of a tensor of the checkpoint, without ``model.``; "" for others'."""
        match = re.match(r"mtp\.(\d+)\.(.+)", name)
        if match is None or match[2].startswith(COPIES):
            return ""
        rest = match[2]
        if rest in OWN:
            rest = OWN[rest]
        elif not rest.startswith(PROJECTIONS):
            rest = f"mtp_block.{rest}"
        return f"layers.{self.model.first + int(match[1])}.{rest}"
