"""Sleep mode through vLLM's API: memory as the device reports it, and the same tokens afterwards."""

import os
import subprocess
import sys

import pytest
from harness import checkout, layouts, npus

CYCLES = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of the same shapes with 54 MB of weights, most of them experts', whose first matrices are square.

    A square matrix that is transposed once too often has the right shape.
    """
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    directories = []
    for seed in range(2):
        torch.manual_seed(seed)
        directories.append(tmp_path_factory.mktemp("qwen3-moe"))
        transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directories[-1])
    return directories


@pytest.fixture(scope="module")
def result(models):
    command = [sys.executable, str(checkout.PROGRAMS / "sleep_and_wake.py"), *map(str, models), str(CYCLES), "1"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": npus.path()}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = npus.results(done.stdout)
    return found


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
    """Weights of another model, loaded into the awake engine after level 2, and those of the first one after that."""
    assert result["tokens of first weights again"] == result["tokens"]
    served = result["tokens of other weights"]
    gaps = [gap_to_choice(model, result["prompts"], served) for model in models]
    assert gaps[1] < 0.1 < 1 < gaps[0]


def gap_to_choice(model, prompts, served):
    """How far the logits of the served tokens are from transformers' largest, on average."""
    import torch

    exact, gaps = layouts.reference(model, "bfloat16"), []
    for prompt, tokens in zip(prompts, served, strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1))
    return float(torch.cat(gaps).mean())


def test_wake_up_keeps_addresses_and_graphs(result):
    awake = result["awake"]
    assert len(awake["graphs"]) == 2
    for later in ("awake again", "after cycles"):
        assert (result[later]["addresses"], result[later]["graphs"]) == (awake["addresses"], awake["graphs"])


def test_sleep_cycles_leak_no_memory(result):
    assert result["after cycles"]["used"] <= result["awake again"]["used"] + 1e6
