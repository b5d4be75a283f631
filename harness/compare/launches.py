# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launches and bytes of a decoder layer, counted and as needed: `tools/check launches` and
e2e/test_launch_counts.py."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness import checkout
from harness.engines import npus, vllm_runner

PROGRAM = checkout.PROGRAMS / "count_launches.py"
KEPT = checkout.TOOLS / "generated_docs" / "launches.json"
KEPT_V2 = KEPT.with_stem("launches_v2")
"""Launches outside of layers and host waits with vLLM's V2 model runner, from a run with --runner
v2 on a vLLM that has it."""
REQUESTS, PROMPT, DRAFTS = 16, 63, 3
CACHED = PROMPT + 2  # Tokens in the cache at the second decode step, which is counted.
HIDDEN, HEADS, KV_HEADS, HEAD = 1024, 16, 8, 128  # Sizes of Qwen3-0.6B, except the vocabulary.
BASE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DENSE = BASE | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "intermediate_size": 3072,
}
EXPERTS = BASE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA = BASE | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "intermediate_size": 3072,
    "sliding_window": 512,
    "query_pre_attn_scalar": HEAD,
    "pad_token_id": 2,
}
PADDLEOCR_VL = {
    "model_type": "paddleocr_vl",
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "text_config": (
        BASE
        | {"intermediate_size": 3072}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            }
        }
    ),
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    },
    "tie_word_embeddings": True,
}
BERT = {
    name: BASE[name]
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
} | {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "intermediate_size": 3072,
}
# DeepSeek-V3 with an eighth of its heads, and with other experts and another vocabulary.
LATENT = BASE | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 1024,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 9,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SPARSE = LATENT | {  # DeepSeek-V3.2 in the same way; all tokens are selected.
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_LINEAR = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}
# Qwen3-Next with half of its width and another number of experts; the third layer is counted.
DELTA = (
    EXPERTS
    | _LINEAR
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "shared_expert_intermediate_size": 512,
    }
)
# Qwen3.5 without experts.
DENSE_DELTA = (
    DENSE | _LINEAR | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
)
_ARGUMENTS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _ARGUMENTS | {"strategy": "channel", "dynamic": False},
            "input_activations": _ARGUMENTS | {"strategy": "token", "dynamic": True},
        }
    },
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"config": DENSE, "ranks": 1, "engine": {}},
    "dense, 3 draft tokens": {
        # Prompts have nearly every token, after which three are then looked up.
        "config": DENSE | {"vocab_size": PROMPT + 1},
        "ranks": 1,
        "engine": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": DRAFTS,
                "prompt_lookup_max": 1,
                "prompt_lookup_min": 1,
            }
        },
        "distinct": True,
    },
    "dense, TP2": {"config": DENSE, "ranks": 2, "engine": {"tensor_parallel_size": 2}},
    "Gemma 3": {"config": GEMMA, "ranks": 1, "engine": {}},
    "PaddleOCR-VL (M-RoPE)": {
        "config": PADDLEOCR_VL,
        "ranks": 1,
        "engine": {"limit_mm_per_prompt": {"image": 0}},
    },
    "experts": {"config": EXPERTS, "ranks": 1, "engine": {}},
    "experts, TP2 EP2": {
        "config": EXPERTS,
        "ranks": 2,
        "engine": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    },
    "dense, W8A8": {"config": DENSE | {"quantization_config": INT8}, "ranks": 1, "engine": {}},
    "experts, W8A8": {"config": EXPERTS | {"quantization_config": INT8}, "ranks": 1, "engine": {}},
    "latent attention": {"config": LATENT, "ranks": 1, "engine": {}},
    "latent attention, mla_prolog": {
        "config": LATENT,
        "ranks": 1,
        "engine": {
            "additional_config": {"ascend": {"platform": {"mla_prolog": True}}},
            "gpu_memory_utilization": 0.5,
        },
    },
    "latent attention, W8A8, mla_prolog": {
        "config": LATENT | {"quantization_config": INT8},
        "ranks": 1,
        "engine": {
            "additional_config": {"ascend": {"platform": {"mla_prolog": True}}},
            "gpu_memory_utilization": 0.5,
        },
    },
    "sparse latent attention": {
        "config": SPARSE,
        "ranks": 1,
        "engine": {"gpu_memory_utilization": 0.5},
    },
    "gated delta net, experts": {
        "config": DELTA,
        "ranks": 1,
        "engine": {"gpu_memory_utilization": 0.8},
    },
    "gated delta net": {
        "config": DENSE_DELTA,
        "ranks": 1,
        "engine": {"gpu_memory_utilization": 0.8, "mamba_ssm_cache_dtype": "bfloat16"},
    },
    "gated delta net, float32 states": {
        "config": DENSE_DELTA,
        "ranks": 1,
        "engine": {"gpu_memory_utilization": 0.8, "mamba_ssm_cache_dtype": "float32"},
    },
    "embedding (BERT)": {"config": BERT, "ranks": 1, "engine": {"runner": "pooling"}},
}


GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [REQUESTS, REQUESTS * (1 + DRAFTS)],
    },
}


def run(names: list[str], directory: Path, runner: str = "v1") -> dict[str, Any]:
    """Count the launches of these cases; the trace is written to the directory."""
    cases = [{"name": name, "layers": [2, 3]} | CASES[name] for name in names]
    return {name: per_layer(name, *runs) for name, runs in count(cases, directory, runner).items()}


def captured(cases: dict[str, dict[str, Any]], directory: Path) -> dict[str, Any]:
    """The summary of a decode step in a graph, for cases as in CASES."""
    wanted = [
        {"name": name, "layers": [3]} | case | {"engine": GRAPHS | case["engine"]}
        for name, case in cases.items()
    ]
    runner = "v2" if vllm_runner.IS_V2 else "v1"
    return {name: runs[0]["decode"] for name, runs in count(wanted, directory, runner).items()}


def count(
    cases: list[dict[str, Any]], directory: Path, runner: str = "v1", **more: Any
) -> dict[str, Any]:
    """The summaries of the cases' runs, by name."""
    cases = [{"requests": REQUESTS, "prompt": PROMPT} | case for case in cases]
    variables: dict[str, Any] = {
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
        "ASCEND_EMULATOR_TRACE": str(directory / "trace.json"),
        "ASCEND_EMULATOR_TIME": "modelled",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
    } | more
    done = npus.run(
        2, sys.executable, str(PROGRAM), json.dumps(cases), memory="2GiB", timeout=2400, **variables
    )
    runs = {result["name"]: result["runs"] for result in npus.results(done.stdout)}
    if done.returncode or list(runs) != [case["name"] for case in cases]:
        sys.exit(
            "launches: the program ended with exit code"
            f" {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return runs


def preprocessing(directory: Path) -> dict[str, Any]:
    """Operators before latent attention in a decode step of LATENT, for each alternative that CANN
    offers."""
    trace, command = (
        str(directory / "before.json"),
        [sys.executable, str(checkout.PROGRAMS / "count_preprocessing.py")],
    )
    command += [json.dumps(LATENT), str(REQUESTS)]
    return npus.by_name(npus.run(1, *command, OMP_NUM_THREADS="1", ASCEND_EMULATOR_TRACE=trace))


def needed(case: dict[str, Any], step: str) -> tuple[int, int]:
    """Bytes that one layer has to move in a rank's memory, and to send: each weight once, the keys
    and values that are seen once, and the tokens' hidden state in and out; for each all-reduce what
    a ring sends, 2 (n - 1) / n of the tensor."""
    config, ranks = case["config"], case["ranks"]
    text = config.get("text_config", config)
    heads, kv_heads = (
        text["num_attention_heads"],
        text.get("num_key_value_heads", text["num_attention_heads"]),
    )
    size = HIDDEN // heads if config is BERT else HEAD
    rows = REQUESTS * (1 + DRAFTS if "speculative_config" in case["engine"] else 1)
    tokens, seen = {
        "prefill": (REQUESTS * PROMPT, REQUESTS * PROMPT),
        "decode": (rows, REQUESTS * CACHED),
        "mixed": (rows + PROMPT, REQUESTS * (CACHED + 1) + PROMPT),
    }[step]
    hidden, cached = text["hidden_size"], 2 * kv_heads * size // ranks
    weights, router = (2 * heads + 2 * kv_heads) * size * hidden // ranks, 0
    if latent := text.get("kv_lora_rank"):
        rank, rotated, cached = (
            text["q_lora_rank"],
            text["qk_rope_head_dim"],
            latent + text["qk_rope_head_dim"],
        )
        weights = hidden * (rank + cached) + heads * (
            rank * (size + rotated) + latent * 2 * size + size * hidden
        )
    if index := text.get("index_head_dim"):
        cached += index
        weights += text["index_n_heads"] * (rank * index + hidden) + hidden * index
    if linear := text.get("linear_num_value_heads"):
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = linear * text["linear_value_head_dim"]
        weights = hidden * (2 * keys + 3 * values + 2 * linear)
        if shared := text.get("shared_expert_intermediate_size"):
            weights += hidden * (3 * shared + 1)
        # In elements of 16 bits.
        state = values * text["linear_key_head_dim"]
        state *= 2 if case["engine"].get("mamba_ssm_cache_dtype") == "float32" else 1
        state += (text["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    if config.get("num_experts"):
        router = HIDDEN * config["num_experts"]
        weights += 3 * HIDDEN * config["moe_intermediate_size"] * config["num_experts"] // ranks
    else:
        weights += (2 if config is BERT else 3) * hidden * text["intermediate_size"] // ranks
    cache = 0 if config is BERT else cached * (seen + (0 if step == "prefill" else tokens))
    if linear:
        cache = REQUESTS * state * (1 if step == "prefill" else 2)  # a prefill only writes them
    width = 1 if "quantization_config" in config else 2
    return (
        width * weights + 2 * (router + cache + 2 * tokens * hidden),
        2 * 2 * 2 * (ranks - 1) * tokens * hidden // ranks,
    )


def per_layer(name: str, fewer_layers: dict, more_layers: dict) -> dict[str, Any]:
    """The runs of count_launches.py with two numbers of layers, split into one layer and all that
    is outside of the layers. Modelled times are in microseconds."""
    layers_by_name: dict[str, Any] = {}
    other = "layer_types" in CASES[name]["config"]  # the first layer
    for step, fewer in fewer_layers.items():
        more = more_layers[step]
        names = Counter(more["names"])
        names.subtract(fewer["names"])
        launches = {name: count for name, count in sorted(names.items()) if count}
        by_name = {
            name: more["moved"][name] - fewer["moved"].get(name, 0)
            for name in launches
            if name in more["moved"]
        }
        moved, sent = needed(CASES[name], step)
        layers_by_name[step] = {
            "launches": launches,
            "moved": by_name,
            "outside": None if other else sum(fewer["names"].values()) - 2 * sum(launches.values()),
            "bytes": more["bytes"] - fewer["bytes"],
            "needed": moved,
            "sent": more["sent"] - fewer["sent"],
            "to send": sent,
            "waits": max(fewer["waits"], more["waits"]),
            "modelled": round(sum(more["modelled"].values()) - sum(fewer["modelled"].values()), 1),
            "exposed": round(more["exposed"] - fewer["exposed"], 1),
            "ai_cpu": more["ai_cpu"],
            "masked": more["masked"] - fewer["masked"],
            "compilations": more["compilations"],
        }
    return layers_by_name


def main() -> None:
    """See tools/check launches."""
    parser = argparse.ArgumentParser(
        prog="tools/check launches", description="Count what a decoder layer launches and moves."
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of: {'; '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--runner",
        choices=["v1", "v2"],
        default="v1",
        help="vLLM's model runner; V2 from vLLM 0.33 on",
    )
    given = parser.parse_args()
    names = given.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are: {'; '.join(CASES)}")
    with tempfile.TemporaryDirectory() as directory:
        kept = run(names, Path(directory), given.runner)
        before = preprocessing(Path(directory)) if "latent attention" in names else {}
    print(json.dumps(kept, indent=1), *before.values(), sep="\n")
    if given.runner == "v2":
        outside = {
            name: {step: [each["outside"], each["waits"]] for step, each in kept[name].items()}
            for name in kept
        }
        KEPT_V2.write_text(json.dumps(json.loads(KEPT_V2.read_text()) | outside, indent=1) + "\n")
    else:
        kept = json.loads(KEPT.read_text()) | kept
        KEPT.write_text(
            json.dumps({name: kept[name] for name in CASES if name in kept}, indent=1) + "\n"
        )
    sys.exit(
        subprocess.run([sys.executable, checkout.TOOLS / "docs-tables"], check=False).returncode
    )
