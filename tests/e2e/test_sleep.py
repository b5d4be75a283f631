"""Sleep mode through vLLM's API: memory as the device reports it, and the same tokens afterwards."""

import os
import subprocess
import sys

import pytest
from harness import checkout, npus

CYCLES = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with 52 MB of weights, large relative to the allocator's rounding."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    directory = tmp_path_factory.mktemp("qwen3")
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def run(model, tensor):
    command = [sys.executable, str(checkout.PROGRAMS / "sleep_and_wake.py"), model, str(CYCLES), str(tensor)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": npus.path()}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = npus.results(done.stdout)
    return found


@pytest.fixture(scope="module")
def result(model):
    return run(model, 1)


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


def test_sleep_cycles_leak_no_memory(result):
    assert result["after cycles"]["used"] <= result["awake again"]["used"] + 1e6
