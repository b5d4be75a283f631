"""Mixture of experts on CANN's operators: choice of experts, their grouped matrix products, and the sum of what they made.

vLLM's routers call ``torch.ops._moe_C`` for the choice (``vllm/model_executor/layers/fused_moe/router/fused_topk_router.py``),
which on the NPU is defined here; experts without quantization are ``UnquantizedFusedMoEMethod``, a CustomOp, replaced by
``register_oot``. The operators' shapes, dtypes and limits are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from ascend_platform.vllm_overrides import override, require

SOFTMAX, SIGMOID = 0, 1  # norm_type of npu_moe_gating_top_k
BEST, SUM_OF_BEST_TWO = 0, 1  # its group_select_mode

_definitions = torch.library.Library("_moe_C", "FRAGMENT")
_WRITTEN = "Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) rows"
_definitions.define(f"topk_softmax({_WRITTEN}, Tensor logits, bool renormalize, Tensor? bias, Tensor? padding) -> ()")
_definitions.define(
    f"topk_sigmoid({_WRITTEN}, Tensor logits, bool renormalize, Tensor? bias, float factor, Tensor? padding) -> ()"
)


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> None:
    """The k best of the experts' softmax; weights float32 and ids int32 ``[tokens, k]`` are written, ``rows`` is not.

    Args:
        logits: ``[tokens, experts]`` of float32, float16 or bfloat16.
        renormalize: let the weights of a token add up to 1.
        bias: ``[experts]``, added for the choice alone.
        padding: not looked at: rows of padding choose as others do, and nobody reads what comes of them.
    """
    if bias is None:
        chosen, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits.float(), k=ids.shape[1], renorm=int(renormalize))
    else:
        chosen, experts = gate(logits, ids.shape[1], SOFTMAX, renormalize, bias)
    weights.copy_(chosen)
    ids.copy_(experts)


def topk_sigmoid(
    weights: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    factor: float,
    padding: torch.Tensor | None,
) -> None:
    """As :func:`topk_softmax`, of the experts' sigmoids; the weights are multiplied by ``factor``."""
    chosen, experts = gate(logits, ids.shape[1], SIGMOID, renormalize, bias, factor)
    weights.copy_(chosen)
    ids.copy_(experts)


for _function in (topk_softmax, topk_sigmoid):
    require(f"vllm._custom_ops:{_function.__name__}")  # which calls it
    _definitions.impl(_function.__name__, _function, "PrivateUse1")


def gate(
    logits: torch.Tensor,
    k: int,
    norm: int,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    groups: int = 1,
    best_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts of each token by npu_moe_gating_top_k: weights float32 and ids int32, both ``[tokens, k]``.

    Args:
        logits: ``[tokens, experts]``.
        norm: SOFTMAX or SIGMOID, over a token's logits.
        renormalize: let the weights of a token add up to 1, before ``factor``.
        bias: ``[experts]``, added for the choice alone.
        groups, best_groups: experts are chosen from this many groups of neighbours, the best by their best expert, or with
            a bias by their best two together.
    """
    select = BEST if bias is None else SUM_OF_BEST_TWO
    # the operator lets sigmoids add up to 1 and leaves softmax as it is; the other two are done here
    inside = renormalize == (norm == SIGMOID)
    weights, ids, normed = torch_npu.npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=best_groups,
        group_count=groups,
        group_select_mode=select,
        renorm=0,
        norm_type=norm,
        out_flag=not inside and norm == SIGMOID,
        routed_scaling_factor=factor if inside else 1.0,
    )
    if inside:
        return weights, ids
    if renormalize:
        return weights * (factor / weights.sum(-1, keepdim=True)), ids
    return normed.gather(1, ids.long()) * factor, ids


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
    """vLLM's function of this name in one operator, where the groups are those that it takes: of more than two experts."""
    experts = gating_output.shape[-1]
    if scoring_func not in ("softmax", "sigmoid") or (num_expert_group > 1 and experts // num_expert_group <= 2):
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
    return gate(gating_output, topk, norm, renormalize, bias, factor, num_expert_group, topk_group)


# the router has no hook for it: it takes the function from its own module (grouped_topk_router.py, _compute_routing)
override("vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk", grouped_topk)


def map_to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The copies of the chosen experts that take each token, in turn: integers ``[tokens, k]`` as ``topk_ids``.

    Args:
        expert_load_view: ``[physical experts]``, counts; written where ``record_enabled``, a scalar bool, says so.
        logical_to_physical_map: ``[experts, most copies]``, of which expert i has ``logical_replica_count[i]``.
        num_unpadded_tokens: a scalar; tokens from there on do not count. All count without it.
    """
    ids = topk_ids.long()
    token = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    physical = logical_to_physical_map[ids, token % logical_replica_count[ids]]
    counts = record_enabled if num_unpadded_tokens is None else record_enabled & (token < num_unpadded_tokens)
    expert_load_view.scatter_add_(0, physical.flatten(), counts.expand_as(physical).flatten().to(expert_load_view.dtype))
    return physical.to(topk_ids.dtype)


# vLLM's own is a Triton kernel for three devices, and on others leaves the ids as they are (base_router.py)
override("vllm.model_executor.layers.fused_moe.router.base_router:eplb_map_to_physical_and_record", map_to_physical)


Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class NPUExperts:
    """Put before a FusedMoEMethodBase of vLLM: experts applied by grouped matrix products, wherever their tokens are.

    Where tokens are spread over ranks (data parallelism, sequence parallelism), the manager of vLLM's group of experts
    carries them: its ``apply_experts`` where it has one, else its dispatch and combine.
    """

    is_monolithic = False  # the router chooses first
    supports_internal_mk = True  # dispatch and combine are called here, not by the runner around it
    moe: Any

    def setup_experts(self, layer: Any) -> None:
        """Take the range of this rank's experts.

        Raises:
            ValueError: experts of a kind that is not served, by name.
        """
        unserved = {
            f"the activation {layer.activation.value}": layer.activation is not MoEActivation.SILU,
            "biases": self.moe.has_bias,
            "weights applied to the experts' input": layer.apply_router_weight_on_input,
        }
        if named := [what for what, asked in unserved.items() if asked]:
            raise ValueError(f"experts with {', '.join(named)} are not served; plain SwiGLU experts are")
        here = range(self.moe.num_experts) if layer.expert_map is None else (layer.expert_map >= 0).nonzero().flatten().tolist()
        self.first, self.count = here[0], len(here)

    def apply_routed(self, experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """What a token's experts make of it, weighed and added: ``[tokens, hidden]``.

        With tensor parallelism, or experts of other ranks without an exchange of tokens, a part of the sum: the runner adds
        it up. Shared experts are the runner's, too.
        """
        parallel = self.moe.moe_parallel_config
        if parallel.dp_size == 1 and not parallel.is_sequence_parallel:
            return self.apply_local(experts, x, topk_weights, topk_ids)
        group = get_ep_group()
        manager = getattr(group.device_communicator, "all2all_manager", None)
        if parallel.use_ep and (exchange := getattr(manager, "apply_experts", None)):
            done = exchange(x, topk_weights, topk_ids, self.moe.num_experts, experts)
            if done is not None:
                return done
        x, topk_weights, topk_ids = group.dispatch(x, topk_weights, topk_ids, parallel.is_sequence_parallel)[:3]
        return group.combine(self.apply_local(experts, x, topk_weights, topk_ids), parallel.is_sequence_parallel)

    def apply_local(self, experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
            x,
            topk_ids,
            active_num=topk_ids.numel(),
            expert_num=self.moe.num_experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first, self.first + self.count],
            quant_mode=-1,
        )
        made = experts(rows, counts)
        weights = topk_weights.to(made.dtype)
        if self.count < self.moe.num_experts:
            # Choices of other ranks' experts have place -1. They read row 0 with weight 0, which is not written if no
            # token has chosen an expert of this rank.
            weights = weights * (places >= 0).view(weights.shape)
            places = places.clamp_min(0)
            made[:1].masked_fill_(counts.sum() == 0, 0)
        return torch_npu.npu_moe_finalize_routing(made, None, None, None, weights, places, None, drop_pad_mode=2)


@UnquantizedFusedMoEMethod.register_oot
class NPUFusedMoEMethod(NPUExperts, UnquantizedFusedMoEMethod):
    """Experts' weights as vLLM has them (``w13_weight [experts, 2 * inner, hidden]``, ``w2_weight [experts, hidden, inner]``)."""

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
        experts = functools.partial(swiglu_experts, layer.w13_weight, layer.w2_weight)
        return self.apply_routed(experts, x, topk_weights, topk_ids)


def swiglu_experts(w13: torch.Tensor, w2: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each expert applied to its rows, which are in the experts' order; rows behind the last are undefined.

    Args:
        w13: ``[experts, 2 * inner, hidden]``, gate and up.
        w2: ``[experts, hidden, inner]``.
        rows: ``[rows, hidden]``.
        counts: int64 ``[experts]``, how many rows each expert has.
    """
    inner = torch_npu.npu_swiglu(grouped_matmul(rows, w13.transpose(1, 2), counts))
    return grouped_matmul(inner, w2.transpose(1, 2), counts)


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each expert's rows by its matrix: ``[rows, out]`` from rows ``[rows, in]`` and weight ``[experts, in, out]``.

    Args:
        counts: int64 ``[experts]``, how many rows each expert has.
        options: of npu_grouped_matmul; the tensors among them are put into lists.
    """
    kind = 0 if len(counts) == 1 else 1  # one group is taken only as a running sum, which a single count is, too
    lists = {name: [value] if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return torch_npu.npu_grouped_matmul(
        [rows], [weight], split_item=2, group_type=0, group_list=counts, group_list_type=kind, **lists
    )[0]
