"""Identity of a rank's weights: what must agree for a peer's weights to be usable here."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_platform import extension
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import parallel_state

from ascend_model_loader.wire import printable

IGNORED_CONFIG_KEYS = {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype"}
"""Keys of the model's configuration that do not affect its weights, or are compared separately."""

SAMPLE_BYTES = 256


def weight_identity(vllm_config: VllmConfig, model_config: ModelConfig, name: str | None = None) -> dict[str, str]:
    """Identity of this rank's weights, as in a peer's manifest.

    Args:
        name: used instead of ``--model`` and ``--revision``.
    """
    parallel = vllm_config.parallel_config
    config = {key: value for key, value in model_config.hf_config.to_dict().items() if key not in IGNORED_CONFIG_KEYS}
    experts, eplb = "none", parallel.eplb_config
    if model_config.is_moe:
        # over all data-parallel engines; without expert parallelism each expert is sharded over this group
        group = parallel_state.get_ep_group()
        redundant = eplb.num_redundant_experts if parallel.enable_eplb else 0
        placement = f"{redundant} redundant" if parallel.enable_expert_parallel else "each sharded"
        experts = f"rank {group.rank_in_group} of {group.world_size}, {placement}"
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return {
        "name": name or f"{model_config.model}@{model_config.revision or 'main'}",
        "checkpoint": checkpoint_fingerprint(Path(model_config.model_weights or model_config.model)),
        "config": _hash(json.dumps(config, sort_keys=True, default=str).encode()),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": str(model_config.quantization),
        "tensor parallelism": f"rank {tensor.rank_in_group} of {tensor.world_size}",
        "pipeline parallelism": f"rank {pipeline.rank_in_group} of {pipeline.world_size}",
        "experts": experts,
        "vLLM": extension.version("vllm").partition("+")[0],
    }


def differences(peer: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Fields in which a peer's identity differs, as one line; "" if there are none.

    Checkpoints are compared by content if both engines have the files, otherwise by name.
    """
    both = bool(peer.get("checkpoint") and own.get("checkpoint"))
    left_out = "name" if both else "checkpoint"
    points = [key for key in own if key != left_out and peer.get(key) != own[key]]
    return "; ".join(f"{key}: the peer has {printable(str(peer.get(key)))}, this engine {own[key]}" for key in points)


def registry_key(identity: Mapping[str, str]) -> str:
    """Hash of the fields that must be equal, as 16 hexadecimal digits."""
    return _hash(json.dumps([identity[each] for each in sorted(identity) if each not in ("name", "checkpoint")]).encode())


def checkpoint_fingerprint(directory: Path) -> str:
    """Hash of a directory's safetensors files; "" if there are none.

    It covers their headers and the first, middle and last 256 bytes of each tensor: reading everything would take as long as
    loading.
    """
    paths = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = file.read(min(length, 100_000_000))
            digest.update(b"%d" % path.stat().st_size + head + header)
            for begin, end in _ranges(header):
                for at in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)}):
                    file.seek(8 + length + at)
                    digest.update(file.read(min(SAMPLE_BYTES, end - at)))
    return digest.hexdigest()[:16] if paths else ""


def _ranges(header: bytes) -> list[tuple[int, int]]:
    try:
        entries: dict[str, Any] = json.loads(header)
        given = (each["data_offsets"] for name, each in entries.items() if name != "__metadata__")
        return sorted((int(begin), int(end)) for begin, end in given)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # loading such a file fails too


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
