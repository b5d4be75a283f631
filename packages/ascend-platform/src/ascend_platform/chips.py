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
        operators: fused operators of torch_npu that are used if a chip has them, and replaced
            otherwise.
        quantization: schemes of quantized weights; None means all.
        top_k_top_p: whether the chip has npu_sim_exponential_ and npu_top_k_top_p_sample.
        moe_routing: whether it has npu_moe_init_routing_v2 and npu_moe_re_routing, which all-to-all
            needs.
        token_unpermute: whether it has npu_moe_token_unpermute, which expert parallelism needs.
        weight_nz: whether int8 weights of npu_quant_matmul and of experts are stored in FRACTAL_NZ,
            which the operators' documentation recommends.
        chunk_head_size: the largest heads of npu_fused_infer_attention_score over pages where a
            request has several query tokens and keys before them.
        rows_in_nz: whether FRACTAL_NZ is that of the matrix as a checkpoint has it, ``[out, in]``,
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
    quantization: tuple[str, ...] | None = ()
    top_k_top_p: bool = False
    moe_routing: bool = False
    token_unpermute: bool = False
    weight_nz: bool = False
    chunk_head_size: int = 256
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

_A2 = ChipFamily(
    "Atlas A2",
    ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"),
    dtypes=ALL_DTYPES,
    operators=ALL_OPERATORS,
    quantization=None,
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
        operators=frozenset({"npu_add_rms_norm", "npu_fusion_attention"}),
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
class ChipFigures:
    """Published figures of one NPU, for estimates.

    Attributes:
        name: the chip's; a longer name that begins with it is the same chip.
        memory_gib: device memory in GiB.
        bandwidth_gbs: bandwidth of device memory in GB/s.
        tflops: of 16-bit matmuls; 8-bit matmuls are twice as fast ("140 TOPS INT8" of 310P).
        node: NPUs joined by the links below.
        network_gbs: GB/s of one NPU beyond the node, in one direction.
        collective_us: least time of a collective without data, in microseconds.
        link_gbs: GB/s to each other NPU of the node, in one direction; 0 where ``injection_gbs`` is
            the limit.
        injection_gbs: GB/s out of one NPU in one direction, to any number of peers of the node.
    """

    name: str
    memory_gib: float
    bandwidth_gbs: float
    tflops: float
    node: int
    network_gbs: float
    collective_us: float
    link_gbs: float = 0.0
    injection_gbs: float = 0.0

    def send_gbs(self, ranks: int) -> float:
        """GB/s that an NPU sends to ``ranks`` - 1 peers at once."""
        if ranks > self.node:
            return self.network_gbs
        return self.injection_gbs or self.link_gbs * (ranks - 1)


def _atlas_a2(name: str, memory_gib: float, bandwidth_gbs: float, tflops: float) -> ChipFigures:
    return ChipFigures(
        name,
        memory_gib,
        bandwidth_gbs,
        tflops,
        node=8,
        network_gbs=25,
        collective_us=20,
        link_gbs=28,
    )


# Sources:
# - memory, bandwidth, cores, host link: Huawei's product pages for Atlas 800T A2, Atlas 800T A3 and
# Atlas 300I Duo.
# Of Ascend910B4-1 there is none: its 64 GiB and 20 cores are what npu-smi prints in public reports
# (vllm-project/vllm-ascend, issues 9428 and 11736), its bandwidth is that of the other chips of 64 GiB.
# - tflops: cube cores x 8192 operations a cycle x 1.8 GHz (1.08 GHz on 310P, for which 70 TFLOPS
# are published).
# - link_gbs: HCCS of an Atlas 800T A2, 392 GB/s over seven links in both directions.
# - injection_gbs: on A3 half of the 392 GB/s that "Serving Large Language Models on Huawei
# CloudMatrix384" (arXiv 2506.12708) gives for a package of two NPUs; on 310P half of a PCIe 4.0 x16
# slot that two NPUs share.
# - network_gbs: 200 Gbit/s RoCE.
# - collective_us: on A3 of a public profile (docs/modelled-times.md); otherwise an order of magnitude,
# of HCCL's AIV mode and, on 310P, over PCIe.
FIGURES = {
    figures.name: figures
    for figures in (
        _atlas_a2("Ascend910B1", 64, 1600, 354),
        _atlas_a2("Ascend910B2", 64, 1600, 354),
        _atlas_a2("Ascend910B3", 64, 1600, 295),
        _atlas_a2("Ascend910B4", 32, 800, 295),
        _atlas_a2("Ascend910B4-1", 64, 1600, 295),
        ChipFigures(
            "Ascend910_93",
            64,
            1600,
            354,
            node=16,
            network_gbs=25,
            collective_us=6,
            injection_gbs=196,
        ),
        ChipFigures(
            "Ascend310P3", 48, 204, 70, node=8, network_gbs=3, collective_us=100, injection_gbs=16
        ),
    )
}
"""By chip name."""
PROFILED = "Ascend910_93"
"""The chip of the public profile on which laws of modelled times are fitted."""


ALIASES = {"a3": "910_93", "910c": "910_93", "310p": "310p3"}
"""Other names of a chip, in lower case and without "Ascend"."""


def figures_of(chip: str) -> ChipFigures | None:
    """The figures of a chip by its name, or None.

    The name is that of torch_npu (``Ascend910B3``), that of npu-smi (``910B3``), in any case, or
    one of ``ALIASES``. Of two chips of which one name begins with the other (Ascend910B4 and
    Ascend910B4-1), the longer name decides.
    """
    name = chip.lower().removeprefix("ascend")
    name = f"ascend{ALIASES.get(name, name)}"
    found = [each for each in FIGURES.values() if name.startswith(each.name.lower())]
    return max(found, key=lambda each: len(each.name), default=None)


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
