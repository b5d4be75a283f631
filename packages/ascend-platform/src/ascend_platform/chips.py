# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Facts of Ascend chips: the capabilities of each family and the published figures of each model.

No other module of the platform names a chip. A family lists a capability where the documentation of
torch_npu or of op-plugin names it for the operators concerned; a chip of no family has the defaults
of :class:`ChipFamily`. The module imports neither torch nor vLLM, because
``ascend_platform.extension`` imports it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class MC2Algorithm:
    """An algorithm of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2, with its
    limits by their documentation.

    Attributes:
        comm_alg: its name; "" is the default of the operators.
        ranks: sizes of the expert-parallel group.
        tokens: the most tokens of a rank.
        hidden: sizes of a token, in elements.
        expert_scales: whether the router's weights travel with the tokens.
    """

    comm_alg: str
    ranks: frozenset[int]
    tokens: int
    hidden: range
    expert_scales: bool = False


@dataclass(frozen=True)
class MC2:
    """The MC2 algorithms of a family.

    Attributes:
        default: the algorithm.
        internode: the algorithm for a group over several machines, where it takes the group; None:
            the default.
        group_buffer: whether the buffer size of a group's own HCCL options counts, not only
            HCCL_BUFFSIZE.
        within_machine: whether data between the NPUs of a machine stays on their own links.
    """

    default: MC2Algorithm
    internode: MC2Algorithm | None = None
    group_buffer: bool = True
    within_machine: bool = True


@dataclass(frozen=True)
class ChipFamily:
    """Capabilities that all chips of a family share.

    Attributes:
        name: of the device family.
        prefixes: of the chips' names, as ``aclrtGetSocName`` and torch_npu give them.
        streams: of an NPU; each captured graph keeps some for as long as it lives (CANN's API
            reference, ``aclrtCreateStream``).
        dtypes: of models; the first is what a model gets whose own dtype is not among them.
        operators: fused operators of torch_npu that the chip supports; others are replaced.
        quantization: schemes of quantized weights.
        top_k_top_p: whether the chip has npu_sim_exponential_ and npu_top_k_top_p_sample.
        moe_routing: whether it has npu_moe_init_routing_v2 and npu_moe_re_routing, which all-to-all
            needs.
        token_unpermute: whether it has npu_moe_token_unpermute, which expert parallelism needs.
        weight_nz: whether int8 weights of npu_quant_matmul and of experts are stored in FRACTAL_NZ,
            which the operators' documentation recommends.
        chunk_head_size: the largest heads of npu_fused_infer_attention_score over pages where a
            request has several query tokens and keys before them.
        chunk_rule_sizes: of keys and values of npu_chunk_gated_delta_rule.
        chunk_rule_float32: whether that operator takes states in float32, not only in bfloat16.
        rows_in_nz: whether FRACTAL_NZ is the format of the matrix ``[out, in]``, as in checkpoints,
            not of its transpose.
        vector_collectives: whether HCCL has the expansion mode AIV.
        assigns_by_mask: whether ``tensor[mask] = rows`` works.
        mc2: MC2's algorithms, None without its operators.
    """

    name: str
    prefixes: tuple[str, ...]
    streams: int = 1984
    dtypes: tuple[str, ...] = ("float16", "float32")
    operators: frozenset[str] = frozenset()
    quantization: tuple[str, ...] = ()
    top_k_top_p: bool = False
    moe_routing: bool = False
    token_unpermute: bool = False
    weight_nz: bool = False
    chunk_head_size: int = 256
    chunk_rule_sizes: range = range(128, 129)
    chunk_rule_float32: bool = False
    rows_in_nz: bool = False
    vector_collectives: bool = False
    assigns_by_mask: bool = True
    mc2: MC2 | None = None

    def lacks(self, *operators: str) -> list[str]:
        """Those of the operators that the chips of this family do not have."""
        return [name for name in operators if name not in self.operators]


ALL_DTYPES = ("bfloat16", "float16", "float32")
ALL_OPERATORS = frozenset(
    {
        "npu_add_rms_norm",
        "npu_chunk_gated_delta_rule",
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "npu_fusion_attention",
        "npu_gemma_rms_norm",
        "npu_kv_quant_sparse_flash_attention",
        "npu_lightning_indexer",
        "npu_mla_prolog_v3",
        "npu_moe_gating_top_k",
        "npu_moe_init_routing_v2",
        "npu_mrope",
        "npu_recurrent_gated_delta_rule",
        "npu_rms_norm",
        "npu_scatter_nd_update_",
        "npu_scatter_pa_kv_cache",
        "npu_sparse_flash_attention",
        "npu_swiglu",
    }
)
"""Of Atlas A2 and A3. torch_npu's documentation lists the supported devices of each operator
(op-plugin:
docs/zh/custom_APIs)"""

_SCHEMES = ("W8A8", "W8A8_DYNAMIC", "W8A16", "W4A16", "W4A8_DYNAMIC", "W4A16_MXFP4")
_SCHEMES_OF_950 = (
    # By op-plugin's tests for the chip. Of W8A16 none names it, and of W4A8_DYNAMIC only one with
    # weights in FRACTAL_NZ in groups of 256.
    "W8A8",
    "W8A8_DYNAMIC",
    "W4A16",
    "W8A8FP8_DYNAMIC",
    "W8A8FP8_BLOCK",
    "W8A8_MXFP8",
    "W4A8_MXFP",
    "W4A4_MXFP4",
    "W4A16_MXFP4",
)

_A2 = ChipFamily(
    "Atlas A2",
    ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"),
    dtypes=ALL_DTYPES,
    operators=ALL_OPERATORS,
    quantization=_SCHEMES,
    weight_nz=True,
    chunk_head_size=192,  # vllm-ascend, pull request 16303
    vector_collectives=True,
    top_k_top_p=True,
    moe_routing=True,
    token_unpermute=True,
    mc2=MC2(
        MC2Algorithm(
            "fullmesh",
            frozenset({*range(2, 9), 16, 32, 64, 128, 256}),
            256,
            range(32, 7168 + 1, 32),
            True,
        ),
        MC2Algorithm("hierarchy", frozenset({16, 32, 64}), 512, range(32, 10240 + 1, 32), True),
        group_buffer=False,
        within_machine=False,  # "fullmesh" moves by RDMA (op-plugin's page)
    ),
)

FAMILIES = (
    _A2,
    dataclasses.replace(
        _A2,
        name="Atlas A3",
        prefixes=("Ascend910_93",),
        chunk_head_size=256,
        operators=ALL_OPERATORS | {"npu_quant_lightning_indexer"},
        # The default, fullmesh_v1: the combine takes that name no more than fullmesh_v2.
        mc2=MC2(MC2Algorithm("", frozenset(range(2, 769)), 512, range(1024, 8192 + 1))),
    ),
    ChipFamily(
        "Ascend 950",
        ("Ascend950", "Ascend910_95"),
        dtypes=ALL_DTYPES,
        # By the pages and tests of op-plugin for this chip, or because vllm-ascend calls them on
        # it (its A5DeviceAdaptor). Neither names the others.
        operators=ALL_OPERATORS
        - {"npu_gemma_rms_norm", "npu_mrope", "npu_recurrent_gated_delta_rule"}
        | {"npu_quant_lightning_indexer"},
        chunk_rule_sizes=range(1, 129),
        chunk_rule_float32=True,
        moe_routing=True,
        token_unpermute=True,
        # As on A3, with the router's weights: vllm-ascend passes them on this chip.
        mc2=MC2(MC2Algorithm("", frozenset(range(2, 769)), 512, range(1024, 8192 + 1), True)),
        quantization=_SCHEMES_OF_950,
    ),
    # npu_dynamic_quant and per-token scales of npu_quant_matmul are for A2 and A3, so only static
    # activation quantization is supported.
    ChipFamily(
        "Ascend 310P",
        ("Ascend310P",),
        streams=1024,
        operators=frozenset(
            {
                "_npu_paged_attention_splitfuse_v2",
                "npu_add_rms_norm",
                "npu_moe_init_routing_v2",
                "npu_rms_norm",
            }
        ),
        quantization=("W8A8",),
        weight_nz=True,
        rows_in_nz=True,
        assigns_by_mask=False,
    ),
    # "Ascend910B" is also a name of the first generation.
    ChipFamily(
        "Ascend 910A",
        ("Ascend910A", "Ascend910P", "Ascend910B"),
        operators=frozenset({"npu_rms_norm"}),
    ),
)
"""The first whose prefixes fit is a chip's family."""

UNKNOWN = ChipFamily("unknown", ())


def family_of(chip: str) -> ChipFamily:
    """The family of a chip by its name, ``UNKNOWN`` if it is of none."""
    return next((family for family in FAMILIES if chip.startswith(family.prefixes)), UNKNOWN)


@dataclass(frozen=True)
class Chip:
    """The NPU of this process. ``memory`` is in bytes."""

    name: str
    memory: int
    cube_cores: int
    vector_cores: int

    @property
    def family(self) -> ChipFamily:
        """Capabilities of the chip's family; see ``ascend_platform/chips.py``."""
        return family_of(self.name)


def chip() -> Chip:
    """The NPU that this process uses. Creates the device's context, so call it in a worker only."""
    import torch

    properties = torch.npu.get_device_properties(torch.npu.current_device())
    return Chip(
        properties.name,
        properties.total_memory,
        properties.cube_core_num,
        properties.vector_core_num,
    )
