# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sleep mode through vLLM's API: memory as the device reports it, and the same tokens
afterwards."""

import json
import os
import subprocess
import sys

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus

CYCLES = 20


SHAPE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 96,
}
SELECTED = {"index_topk": 32, "index_n_heads": 32, "index_head_dim": 128}
FAMILIES = {
    "Qwen3Moe": SHAPE | {"num_experts": 32, "num_key_value_heads": 2, "head_dim": 128},
    "GlmMoeDsa": (
        SHAPE
        | LATENT
        | SELECTED
        | {
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        }
        | {
            "num_key_value_heads": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "indexer_rope_interleave": True,
        }
    ),
    "DeepseekV3": (
        SHAPE
        | LATENT
        | {  # Sizes of npu_mla_prolog_v3, which has copies of weights.
            "num_key_value_heads": 4,
            "hidden_size": 6144,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 2,
            "initializer_range": 0.02,
        }
    ),
}
PROLOG = {
    "additional_config": {"ascend": {"platform": {"mla_prolog": True}}},
    "gpu_memory_utilization": 0.5,
}
ENGINES = {"DeepseekV3": PROLOG}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """Two models of the same shapes with 54 MB of weights and more; of the first two families most
    of them are experts', whose first matrices are square.

    A square matrix that is transposed once too often has the right shape.
    """
    import torch
    import transformers

    family = request.param
    directories = []
    for seed in range(2):
        torch.manual_seed(seed)
        directories.append(tmp_path_factory.mktemp(family))
        config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
        getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(
            directories[-1]
        )
    return directories


@pytest.fixture(scope="module")
def result(models):
    engine = ENGINES.get(models[0].name.removesuffix("0"), {})
    command = [
        sys.executable,
        str(checkout.PROGRAMS / "sleep_and_wake.py"),
        *map(str, models),
        str(CYCLES),
        json.dumps(engine),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": npus.path()},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = npus.results(done.stdout)
    return record


def test_sleep_frees_weights_and_cache(result):
    awake, asleep = result["awake"], result["asleep"]
    assert awake["weights"] > 50e6
    assert asleep["weights"] == asleep["kv_cache"] == 0
    assert awake["used"] - asleep["used"] >= awake["kv_cache"] + 0.95 * awake["weights"]
    assert result["asleep at level 2"]["used"] <= asleep["used"] + 1e6


def test_tags_wake_separately(result):
    awake, halfway = result["awake"], result["weights awake"]
    assert halfway["weights"] == awake["weights"]
    assert halfway["kv_cache"] == 0
    assert result["awake again"]["kv_cache"] == awake["kv_cache"]


@pytest.mark.parametrize("when", ["level 1", "level 2", "cycles"])
def test_tokens_are_the_same(result, when):
    """At level 2 the weights are reloaded from the checkpoint (`reload_weights`)."""
    assert result[f"tokens after {when}"] == result["tokens"]


def test_expert_weights_are_not_transposed_twice(result, models):
    """Weights of another model, loaded into the awake engine after level 2, and those of the first
    one after that."""
    assert result["tokens of first weights again"] == result["tokens"]
    served = result["tokens of other weights"]
    gaps = [gap_to_choice(model, result["prompts"], served) for model in models]
    # bfloat16 also changes which tokens an indexer selects.
    assert gaps[1] < (0.2 if "Dsa" in models[0].name else 0.1)
    assert gaps[0] > 1


def gap_to_choice(model, prompts, served):
    """How far the logits of the served tokens are from transformers' largest, on average."""
    import torch

    exact, gaps = layouts.reference(model, "bfloat16"), []
    for prompt, tokens in zip(prompts, served, strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps.append(
            logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        )
    return float(torch.cat(gaps).mean())


def test_wake_up_keeps_addresses_and_graphs(result):
    awake = result["awake"]
    assert len(awake["graphs"]) == 2
    for later in ("awake again", "after cycles"):
        assert (result[later]["addresses"], result[later]["graphs"]) == (
            awake["addresses"],
            awake["graphs"],
        )


def test_sleep_cycles_leak_no_memory(result):
    assert result["after cycles"]["used"] <= result["awake again"]["used"] + 1e6
