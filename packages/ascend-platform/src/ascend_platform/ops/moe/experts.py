# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Experts of MoE layers: what vLLM's unquantized method and ours of quantized experts share.

``UnquantizedFusedMoEMethod`` is a CustomOp, replaced by ``register_oot``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch_npu
from vllm.distributed import get_ep_group, get_pcp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from ascend_platform.chips import chip
from ascend_platform.errors import RefusedError
from ascend_platform.ops.moe.grouped import chip_family, combine, run_experts
from ascend_platform.protocols import Experts


def clipped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation: ``clamp(gate, max=7) * sigmoid(1.702 gate) * (clamp(up, -7, 7) + 1)``,
    gate and up interleaved."""
    return torch_npu.npu_clipped_swiglu(gate_up, alpha=1.702, limit=7.0, bias=1.0, interleaved=True)


def relu2(up: torch.Tensor) -> torch.Tensor:
    """Nemotron-H's activation, of experts without a gate: ``relu(up)^2``."""
    return torch.relu(up).square_()


def gelu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """Gemma 4's activation: ``gelu(gate) * up`` with GELU's tanh approximation."""
    return torch_npu.npu_geglu(gate_up, approximate=1, activate_left=True)[0]


ACTIVATIONS = {
    MoEActivation.SILU: torch_npu.npu_swiglu,
    MoEActivation.GELU_TANH: gelu_tanh,
    MoEActivation.SWIGLUOAI: clipped_swiglu,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: torch_npu.npu_clipped_swiglu,
    MoEActivation.RELU2_NO_MUL: relu2,
}
"""Activations of unquantized experts and of MXFP4 ones; other quantized ones have the first."""


@dataclasses.dataclass(frozen=True)
class UnquantizedExperts:
    """One layer's experts (``Experts``); see :func:`run_experts` for the fields."""

    w13: torch.Tensor
    w2: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    lora: Any = None
    takes_int8 = False

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return run_experts(self.w13, self.w2, rows, counts, self.lora, self.activation, self.biases)


class NPUExperts:
    """Mixin for vLLM's FusedMoEMethodBase that applies experts by grouped matmuls.

    With data or sequence parallelism the tokens are exchanged by the all2all manager of vLLM's
    expert parallel group: by its ``dispatch_and_combine`` if it has that method, else by vLLM's
    dispatch and combine.
    """

    is_monolithic = False  # routing is a separate step
    supports_internal_mk = True  # Dispatch and combine are called here, not by vLLM's MoE runner.
    moe: Any
    takes_biases = False
    weights_input = False
    """Whether router weights multiply the experts' inputs, instead of their outputs (Llama 4)."""
    activations: tuple[MoEActivation, ...] = (MoEActivation.SILU,)
    lora: Any = None
    """Returns the step's function that finds the adapters of rows (``lora/experts.py``,
    ``FusedMoEWithLoRA.of_step``); None without LoRA on experts."""

    def setup_experts(self, layer: Any) -> None:
        """Store the range of this rank's experts.

        Raises:
            RefusedError: unsupported experts, with the reasons.
        """
        unsupported = {
            f"activation {layer.activation.value}": layer.activation not in self.activations,
            "biases": self.moe.has_bias and not self.takes_biases,
            "a limit of SwiGLU": self.moe.swiglu_limit and not self.takes_biases,
            "router weights on the inputs of several experts of a token": (
                layer.apply_router_weight_on_input and self.moe.experts_per_token > 1
            ),
        }
        if reasons := [reason for reason, is_used in unsupported.items() if is_used]:
            biases = f"{'with or ' * self.takes_biases}without biases"
            activations = ", ".join(each.value for each in self.activations)
            raise RefusedError(
                f"MoE experts with {', '.join(reasons)} are not supported; supported: experts"
                f" {biases} and {activations}; fix: serve another model"
            )
        if layer.expert_map is not None and not chip_family().token_unpermute:
            raise RefusedError(
                f"expert parallelism is not supported on {chip().name}, which lacks"
                " operators for the tokens of other ranks' experts; fix: remove"
                " --enable-expert-parallel"
            )
        self.weights_input = layer.apply_router_weight_on_input
        local: Any = range(self.moe.num_experts)
        if layer.expert_map is not None:
            local = (layer.expert_map >= 0).nonzero().flatten().tolist()
        self.first_expert, self.num_local_experts = local[0], len(local)

    def clip(self, activation: MoEActivation) -> dict[str, Any]:
        """Options of npu_clipped_swiglu for a layer that clips what is not interleaved; none for
        others."""
        moe, options = self.moe, {"limit": self.moe.swiglu_limit, "interleaved": False}
        if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            return options | {"alpha": moe.swiglu_alpha, "bias": moe.swiglu_beta}
        if activation == MoEActivation.SILU and moe.swiglu_limit:
            return options | {"alpha": 1.0, "bias": 0.0}
        return {}

    def activation_of(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function of the layer's activation."""
        if options := self.clip(layer.activation):
            return functools.partial(torch_npu.npu_clipped_swiglu, **options)
        return ACTIVATIONS[layer.activation]

    def apply_routed(
        self, experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the weighted sum of the outputs of each token's experts, ``[tokens, hidden]``.

        With tensor parallelism, or expert parallelism without token exchange, it is a partial sum
        that vLLM's MoE runner reduces. The runner applies shared experts, too.
        """
        if self.weights_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        parallel = self.moe.moe_parallel_config
        if parallel.dp_size == 1 and not parallel.is_sequence_parallel:
            if parallel.pcp_size == 1 or not parallel.use_ep:
                return self.apply_local(experts, x, topk_weights, topk_ids)
            # vLLM's MoE runner exchanges the tokens of prefill context parallelism only without
            # expert parallelism.
            context = get_pcp_group()
            every = (context.all_gather(each, dim=0) for each in (x, topk_weights, topk_ids))
            return context.reduce_scatter(self.apply_local(experts, *every), dim=0)
        group = get_ep_group()
        manager = getattr(group.device_communicator, "all2all_manager", None)
        if parallel.use_ep and (exchange := getattr(manager, "dispatch_and_combine", None)):
            output = exchange(x, topk_weights, topk_ids, self.moe.num_experts, experts)
            if output is not None:
                return output
        x, topk_weights, topk_ids = group.dispatch(
            x, topk_weights, topk_ids, parallel.is_sequence_parallel
        )[:3]
        return group.combine(
            self.apply_local(experts, x, topk_weights, topk_ids), parallel.is_sequence_parallel
        )

    def apply_local(
        self, experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        adapters = self.lora and self.lora()
        # The A matrices multiply rows in the model's dtype.
        takes_int8 = experts.takes_int8 and not adapters
        rows, row_idx, counts, scale = torch_npu.npu_moe_init_routing_v2(
            x,
            topk_ids,
            active_num=topk_ids.numel(),
            expert_num=self.moe.num_experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first_expert, self.first_expert + self.num_local_experts],
            quant_mode=1 if takes_int8 else -1,
        )
        if adapters:
            experts = dataclasses.replace(cast(Any, experts), lora=adapters(row_idx, len(x)))
        expert_out = experts(rows, counts, scale if takes_int8 else None)
        return combine(
            expert_out, row_idx, topk_weights, self.num_local_experts < self.moe.num_experts
        )


@UnquantizedFusedMoEMethod.register_oot
class NPUFusedMoEMethod(NPUExperts, UnquantizedFusedMoEMethod):
    """Unquantized experts: ``w13_weight [experts, 2 * inner, hidden]`` and ``w2_weight [experts,
    hidden, inner]``, as in vLLM.

    Without a gate, ``w13_weight`` is ``[experts, inner, hidden]``.
    """

    takes_biases = True
    activations = tuple(ACTIVATIONS)

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        super().create_weights(layer, *arguments, **named)
        for name in ("w13_bias", "w2_bias") if self.moe.has_bias else ():
            own = getattr(layer, name)
            # npu_grouped_matmul takes float32 biases with bfloat16 weights.
            if own.dtype == torch.bfloat16:
                own.data = own.data.float()

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        self.setup_experts(layer)

    def forward_oot(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else (None, None)
        activation = self.activation_of(layer)
        experts = UnquantizedExperts(layer.w13_weight, layer.w2_weight, activation, biases)
        return self.apply_routed(experts, x, topk_weights, topk_ids)
