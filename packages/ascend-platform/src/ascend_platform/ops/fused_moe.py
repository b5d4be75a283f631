# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused MoE on CANN's operators: top-k routing, grouped matmuls and the weighted sum of expert
outputs.

The functions of vLLM's routers that call CUDA operators are replaced
(``vllm/model_executor/layers/fused_moe/router``). Unquantized experts are the CustomOp
``UnquantizedFusedMoEMethod``, replaced by ``register_oot``. Shapes, dtypes and limits of the NPU
operators are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch_npu
from vllm.distributed import get_ep_group, get_pcp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router, grouped_topk_router
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from ascend_platform.chips import ChipFamily, chip
from ascend_platform.errors import RefusedError
from ascend_platform.protocols import Experts
from ascend_platform.vllm_overrides import override

SOFTMAX, SIGMOID = 0, 1  # norm_type of npu_moe_gating_top_k
MAX_SCORE, TOP2_SUM = 0, 1  # its group_select_mode


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts by softmax; returns new weights float32 and ids ``[tokens, k]``.

    Args:
        topk_weights, topk_indices, token_expert_indices: vLLM's buffers for the results; not used.
        gating_output: ``[tokens, experts]`` of float32, float16 or bfloat16.
        renormalize: scale the weights of a token to a sum of 1.
        e_score_correction_bias: ``[experts]``, added for the selection only.
    """
    if e_score_correction_bias is None:
        weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
            gating_output.float(), k=topk_indices.shape[1], renorm=int(renormalize)
        )
    else:
        weights, ids = gating_top_k(
            gating_output, topk_indices.shape[1], SOFTMAX, renormalize, e_score_correction_bias
        )
    return weights, ids.to(topk_indices.dtype)


def topk_sigmoid(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`topk_softmax` with sigmoid scores; the weights are multiplied by
    ``routed_scaling_factor``."""
    weights, ids = gating_top_k(
        gating_output,
        topk_indices.shape[1],
        SIGMOID,
        renormalize,
        e_score_correction_bias,
        routed_scaling_factor,
    )
    return weights, ids.to(topk_indices.dtype)


# They call torch.ops._moe_C of vLLM's CUDA extension, which writes to the buffers: two copies in
# each layer.
override(
    "vllm.model_executor.layers.fused_moe.router.fused_topk_router:vllm_topk_softmax", topk_softmax
)
override(
    "vllm.model_executor.layers.fused_moe.router.fused_topk_router:vllm_topk_sigmoid", topk_sigmoid
)
override(
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:vllm_topk_softmax",
    topk_softmax,
)
override(
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:vllm_topk_sigmoid",
    topk_sigmoid,
)


def gating_top_k(
    logits: torch.Tensor,
    k: int,
    norm: int,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    groups: int = 1,
    topk_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts of each token with npu_moe_gating_top_k.

    Args:
        logits: ``[tokens, experts]``.
        norm: SOFTMAX or SIGMOID, over a token's logits.
        renormalize: scale the weights of a token to a sum of 1, before ``factor``.
        bias: ``[experts]``, added for the selection only.
        groups: number of expert groups; experts are selected from the best ``topk_groups`` of them.
            A group's score is that of its best expert, or with a bias the sum of its best two.

    Returns:
        Weights float32 and ids int32, both ``[tokens, k]``.
    """
    select = MAX_SCORE if bias is None else TOP2_SUM
    # The operator renormalizes sigmoid scores and never softmax scores; the other two cases are
    # computed here.
    in_operator = renormalize == (norm == SIGMOID)
    weights, ids, scores = torch_npu.npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=topk_groups,
        group_count=groups,
        group_select_mode=select,
        renorm=0,
        norm_type=norm,
        out_flag=not in_operator and norm == SIGMOID,
        routed_scaling_factor=factor if in_operator else 1.0,
    )
    if in_operator:
        return weights, ids
    if renormalize:
        return weights * (factor / weights.sum(-1, keepdim=True)), ids
    return scores.gather(1, ids.long()) * factor, ids


_native_grouped_topk = grouped_topk_router.grouped_topk


@functools.wraps(_native_grouped_topk)
def grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's grouped_topk as one operator; groups of one or two experts fall back to vLLM's
    implementation."""
    experts = gating_output.shape[-1]
    if scoring_func not in ("softmax", "sigmoid") or (
        num_expert_group > 1 and experts // num_expert_group <= 2
    ):
        return _native_grouped_topk(
            hidden_states,
            gating_output,
            topk,
            renormalize,
            num_expert_group,
            topk_group,
            scoring_func,
            routed_scaling_factor,
            e_score_correction_bias,
        )
    norm = SIGMOID if scoring_func == "sigmoid" else SOFTMAX
    bias, factor = e_score_correction_bias, routed_scaling_factor
    return gating_top_k(
        gating_output, topk, norm, renormalize, bias, factor, num_expert_group, topk_group
    )


# The router has no hook for it: grouped_topk_router.py (_compute_routing) calls the function of its
# own module.
override(
    "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk", grouped_topk
)


def eplb_map_to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map logical expert ids to physical ones for EPLB, with replicas in round-robin order;
    ``[tokens, k]`` as ``topk_ids``.

    Args:
        expert_load_view: ``[physical experts]``, token counts; updated if ``record_enabled``, a
        scalar bool, is True.
        logical_to_physical_map: ``[experts, max replicas]``; expert i has
        ``logical_replica_count[i]`` replicas.
        num_unpadded_tokens: scalar; later tokens are padding and not counted. Without it all tokens
        are counted.
    """
    ids = topk_ids.long()
    token = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    physical = logical_to_physical_map[ids, token % logical_replica_count[ids]]
    counts = (
        record_enabled
        if num_unpadded_tokens is None
        else record_enabled & (token < num_unpadded_tokens)
    )
    expert_load_view.scatter_add_(
        0, physical.flatten(), counts.expand_as(physical).flatten().to(expert_load_view.dtype)
    )
    return physical.to(topk_ids.dtype)


# vLLM's function is a Triton kernel for three device types; on others it returns the ids unmapped
# (base_router.py).
override(
    "vllm.model_executor.layers.fused_moe.router.base_router:eplb_map_to_physical_and_record",
    eplb_map_to_physical,
)


def route_with_identities(
    self: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select among experts and, with ids after theirs, identities (LongCat), whose share of the
    output the router keeps.

    An identity becomes an expert that the token has not chosen, with a weight of 0:
    npu_moe_distribute_dispatch takes none twice. Weights are float32, weights and ids ``[tokens,
    k]``.
    """
    weights, ids = fused_topk_bias_router.fused_topk_bias(
        hidden_states=hidden_states,
        gating_output=router_logits,
        e_score_correction_bias=self.e_score_correction_bias.data,
        topk=self.top_k,
        renormalize=self.renormalize,
        scoring_func=self.scoring_func,
        indices_type=indices_type,
    )
    weights, identities = weights * self.routed_scaling_factor, ids >= self.num_logical_experts
    kept = weights.masked_fill(identities, 0)
    self._zero_expert_output = (hidden_states * (weights - kept).sum(-1, keepdim=True)).to(
        hidden_states.dtype
    )
    return kept, torch.where(identities, _unchosen(ids, identities), ids)


def _unchosen(ids: torch.Tensor, is_free: torch.Tensor) -> torch.Tensor:
    """Distinct experts that a token has not selected, lowest first, for its free top-k slots,
    ``[tokens, k]``.

    Among numbers from 0 on, the one after ``n`` others that are not chosen is ``n`` plus the chosen
    ones before it.
    """
    others = is_free.int().cumsum(-1) - 1
    chosen = ids.masked_fill(is_free, torch.iinfo(torch.int32).max).sort(-1).values
    before = chosen - torch.arange(ids.shape[-1], dtype=ids.dtype, device=ids.device)
    return (others + (before[:, None, :] <= others[:, :, None]).sum(-1)).to(ids.dtype)


override(
    "vllm.model_executor.layers.fused_moe.router.zero_expert_router:ZeroExpertRouter._compute_routing",
    route_with_identities,
)


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
    MoEActivation.RELU2_NO_MUL: relu2,
}
"""Activations of unquantized experts; quantized ones have the first."""


class NPUExperts:
    """Mixin for vLLM's FusedMoEMethodBase that applies experts by grouped matmuls.

    With data or sequence parallelism the tokens are exchanged by the all2all manager of vLLM's
    expert parallel group: by its ``apply_experts`` if it has that method, else by dispatch and
    combine.
    """

    is_monolithic = False  # routing is a separate step
    supports_internal_mk = True  # Dispatch and combine are called here, not by vLLM's MoE runner.
    moe: Any
    takes_biases = False
    activations: tuple[MoEActivation, ...] = (MoEActivation.SILU,)
    lora: Any = None
    """Finds the adapters of rows (``ops/lora_experts.py``, ``FusedMoEWithLoRA.of_rows``); None
    without LoRA on experts."""

    def setup_experts(self, layer: Any) -> None:
        """Store the range of this rank's experts.

        Raises:
            ValueError: unsupported experts, with the reasons.
        """
        unsupported = {
            f"activation {layer.activation.value}": layer.activation not in self.activations,
            "biases": self.moe.has_bias and not self.takes_biases,
            "router weights on the experts' input": layer.apply_router_weight_on_input,
        }
        if reasons := [reason for reason, is_used in unsupported.items() if is_used]:
            supported = (
                f"experts {'with or ' * self.takes_biases}without biases and"
                f" {', '.join(each.value for each in self.activations)}"
            )
            raise ValueError(
                f"MoE experts with {', '.join(reasons)} are not supported; supported: {supported}"
            )
        if layer.expert_map is not None and not chip_family().token_unpermute:
            raise RefusedError(
                f"expert parallelism is not supported on {chip().name}, which lacks"
                " operators for the tokens of other ranks' experts; fix: remove"
                " --enable-expert-parallel"
            )
        local = (
            range(self.moe.num_experts)
            if layer.expert_map is None
            else (layer.expert_map >= 0).nonzero().flatten().tolist()
        )
        self.first_expert, self.num_local_experts = local[0], len(local)

    def apply_routed(
        self,
        experts: Experts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the weighted sum of the outputs of each token's experts, ``[tokens, hidden]``.

        With tensor parallelism, or expert parallelism without token exchange, it is a partial sum
        that vLLM's MoE runner reduces. The runner applies shared experts, too.
        """
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
        if parallel.use_ep and (apply_experts := getattr(manager, "apply_experts", None)):
            output = apply_experts(x, topk_weights, topk_ids, self.moe.num_experts, experts)
            if output is not None:
                return output
        x, topk_weights, topk_ids = group.dispatch(
            x, topk_weights, topk_ids, parallel.is_sequence_parallel
        )[:3]
        return group.combine(
            self.apply_local(experts, x, topk_weights, topk_ids), parallel.is_sequence_parallel
        )

    def apply_local(
        self,
        experts: Experts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        takes_int8, apply = getattr(experts, "takes_int8", False), cast(Any, experts)
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
        if self.lora is not None and (adapters := self.lora(row_idx, topk_ids.shape[1])):
            apply = functools.partial(apply, lora=adapters)
        expert_out = apply(rows, counts, scale) if takes_int8 else apply(rows, counts)
        return combine(
            expert_out, row_idx, topk_weights, self.num_local_experts < self.moe.num_experts
        )


def combine(
    expert_out: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, has_dropped: bool
) -> torch.Tensor:
    """Compute the weighted sum of each token's expert outputs, ``[tokens, hidden]``.

    Args:
        expert_out: ``[tokens * k, hidden]``, sorted by expert; dropped rows come last, with any
        values; the last becomes zeros.
        row_idx: int32 ``[tokens * k]``, the row of each copy of a token; -1, of another rank's
        expert, becomes the last one.
        topk_weights: float32 ``[tokens, k]``.
        has_dropped: whether there may be dropped rows.
    """
    # A chip without expert parallelism. Only expert parallelism drops rows.
    if not chip_family().token_unpermute:
        weights = topk_weights.to(expert_out.dtype)
        return torch_npu.npu_moe_finalize_routing(
            expert_out, None, None, None, weights, row_idx, None, drop_pad_mode=2
        )
    if has_dropped:
        # If any row is dropped, the last row belongs to no expert and serves as the zeros of all
        # dropped rows. Weights of 0 are not enough, because 0 times the contents of such a row can
        # be NaN.
        dropped, last = row_idx < 0, len(expert_out) - 1
        expert_out[last:].masked_fill_(dropped.any(), 0)
        row_idx.masked_fill_(dropped, last)
    return torch_npu.npu_moe_token_unpermute(expert_out, row_idx, probs=topk_weights)


@functools.cache
def chip_family() -> ChipFamily:
    """The family of this process's NPU."""
    return chip().family


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
        experts = functools.partial(
            apply_experts,
            layer.w13_weight,
            layer.w2_weight,
            activation=ACTIVATIONS[layer.activation],
        )
        if self.moe.has_bias:
            experts = functools.partial(experts, biases=(layer.w13_bias, layer.w2_bias))
        return self.apply_routed(experts, x, topk_weights, topk_ids)


def apply_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lora: Any = None,
    activation: Callable[[torch.Tensor], torch.Tensor] = torch_npu.npu_swiglu,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Apply experts to rows sorted by expert; output rows after the last expert's are undefined.

    Args:
        w13: ``[experts, 2 * inner, hidden]``, gate and up projections, or ``[experts, inner,
        hidden]`` without a gate.
        w2: ``[experts, hidden, inner]``, down projection.
        rows: ``[rows, hidden]``.
        counts: int64 ``[experts]``, rows per expert.
        lora: adapters of the rows (``ascend_platform.ops.lora_experts.RowLoRA``), or None.
        activation: of the first matmul, whose result becomes ``[rows, inner]``.
        biases: of both matmuls, ``[experts, 2 * inner]`` and ``[experts, hidden]``, in float32 for
        bfloat16 rows; or None.
    """
    first, second = ({} if bias is None else {"bias": bias} for bias in biases)
    gate_up = grouped_matmul(rows, w13.transpose(1, 2), counts, **first)
    if lora is not None:
        lora.add_w13(gate_up, rows, counts)
    inner = activation(gate_up)
    expert_out = grouped_matmul(inner, w2.transpose(1, 2), counts, **second)
    if lora is not None:
        lora.add_w2(expert_out, inner, counts)
    return expert_out


def grouped_matmul(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix; rows ``[rows, in]``, weight ``[experts, in,
    out]``, result ``[rows, out]``.

    Args:
        counts: int64 ``[experts]``, rows per expert.
        options: arguments of npu_grouped_matmul; tensors are wrapped in lists.
    """
    # A single group is supported only as a cumulative sum, which equals its count.
    list_type = 0 if len(counts) == 1 else 1
    lists = {
        name: [value] if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        split_item=2,
        group_type=0,
        group_list=counts,
        group_list_type=list_type,
        **lists,
    )[0]
