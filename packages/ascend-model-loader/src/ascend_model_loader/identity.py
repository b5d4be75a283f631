# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Identity of a rank's weights: what must agree for a peer's weights to be usable here."""

import hashlib
import json
from collections.abc import Mapping

from ascend_platform import extension
from ascend_transfer.checkpoint import weights_fingerprint
from ascend_transfer.errors import printable
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import parallel_state

IGNORED_CONFIG_KEYS = {
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "dtype",
    "torch_dtype",
}
"""Keys of the model's configuration that do not affect its weights, or are compared separately."""


def weight_identity(
    vllm_config: VllmConfig, model_config: ModelConfig, name: str | None = None
) -> dict[str, str]:
    """Identity of this rank's weights, as in a peer's manifest.

    Args:
        name: used instead of ``--model`` and ``--revision``.
    """
    parallel = vllm_config.parallel_config
    config = {
        key: value
        for key, value in model_config.hf_config.to_dict().items()
        if key not in IGNORED_CONFIG_KEYS
    }
    experts, eplb = "none", parallel.eplb_config
    if model_config.is_moe:
        # Over all data-parallel engines; without expert parallelism each expert is sharded over
        # this group.
        group = parallel_state.get_ep_group()
        redundant = eplb.num_redundant_experts if parallel.enable_eplb else 0
        placement = f"{redundant} redundant" if parallel.enable_expert_parallel else "each sharded"
        experts = f"rank {group.rank_in_group} of {group.world_size}, {placement}"
    order = {}
    if model_config.hf_text_config.model_type == "qwen3_next":
        # With adapters, projections of its gated delta nets keep the checkpoint's order.
        order = {"projections": "checkpoint's" if vllm_config.lora_config else "by part"}
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return {
        "name": name or f"{model_config.model}@{model_config.revision or 'main'}",
        "checkpoint": weights_fingerprint(model_config),
        "config": _hash(json.dumps(config, sort_keys=True, default=str).encode()),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": str(model_config.quantization),
        "tensor parallelism": f"rank {tensor.rank_in_group} of {tensor.world_size}",
        "pipeline parallelism": f"rank {pipeline.rank_in_group} of {pipeline.world_size}",
        "experts": experts,
        "vLLM": extension.version("vllm").partition("+")[0],
        **order,
    }


def differences(peer: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Fields in which a peer's identity differs, as one line; "" if there are none.

    Checkpoints are compared by content if both engines have the files, otherwise by name.
    """
    both = bool(peer.get("checkpoint") and here.get("checkpoint"))
    left_out = "name" if both else "checkpoint"
    points = [key for key in here if key != left_out and peer.get(key) != here[key]]
    return "; ".join(
        f"{key}: the peer has {printable(str(peer.get(key)))}, this engine {here[key]}"
        for key in points
    )


def registry_key(identity: Mapping[str, str]) -> str:
    """Hash of the fields that must be equal, as 16 hexadecimal digits."""
    return _hash(
        json.dumps(
            [identity[each] for each in sorted(identity) if each not in ("name", "checkpoint")]
        ).encode()
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
