"""Prefill on one engine and decode on another, over real Mooncake: the tokens of one engine alone."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import npus
import pytest

pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")

HERE = Path(__file__).parent
TP2: dict[str, Any] = {"engine": {"tensor_parallel_size": 2}}

# name: (NPUs and engine of the prefill instance, of the decode instance, requests)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "1-to-1": ({"devices": "0"}, {"devices": "1"}, 40),
    "2-to-1": ({"devices": "0,1"} | TP2, {"devices": "2"}, 40),
    "1-to-2": ({"devices": "0"}, {"devices": "1,2"} | TP2, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_one_engine(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    producer, consumer, requests = CASES[name]
    case = {"model": model(tmp_path), "producer": producer, "consumer": consumer, "requests": requests}
    done = npus.run(
        3, sys.executable, str(HERE / "kv_cases.py"), json.dumps(case), memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS=""
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    print(f"{name}: {result}")
    record_property("seconds", result.pop("seconds"))
    assert result == {
        "ended": {"length": requests},
        "different": [],
        "first differs": [],
        "producer's blocks are free": True,
        "consumer's blocks are free": True,
    }


def model(directory: Path) -> str:
    """A Qwen3 of random weights with two key heads."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,  # choices with clear margins
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
