"""Prefill on one engine and decode on another, over real Mooncake: the tokens of one engine alone, and a peer that is killed; an
engine that fills a pool of real Mooncake processes and is killed, and one that loads, also when the pool's master is killed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import npus
import pytest

pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_tokens_are_those_of_one_engine(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    case: dict[str, Any] = {"model": model(tmp_path), "prefill": {"devices": "0"}, "decode": {"devices": "1"}}
    case["decode"]["tiers"] = {"cpu_bytes_to_use": 200 << 20}  # MultiConnector, with OffloadingConnector in it
    case |= {"pull": 20, "layerwise": 20, "kill": 16, "transfer": {"secret_file": str(tmp_path / "secret")}}
    (tmp_path / "secret").write_text("what both instances have")
    done = npus.run(
        2, sys.executable, str(HERE / "kv_cases.py"), json.dumps(case), memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS=""
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    print(result)
    for phase in ("pull", "layerwise"):
        record_property(f"seconds of {phase}", result[phase]["seconds"])
        assert result[phase]["blocks are free"] == [True, True]
    # of 20, two leave the decode instance and one the prefill instance
    assert result["pull"]["ended"] == {"length": 17, "left": 2, "left there": 1}
    ended = result["layerwise"]["ended"]
    assert ended.pop("length") == 17
    assert set(ended) <= {"left", "left there", "error"}
    assert sum(ended.values()) == 3
    assert result["from host memory"]["ended"] == {"length": 20}
    for phase in ("pull", "layerwise", "from host memory", "killed"):
        assert result[phase]["different"] == []
        assert result[phase]["not transferred"] == []
    assert sum(result["killed"]["ended"].values()) == 16
    assert set(result["killed"]["ended"]) <= {"length", "error"}
    assert result["killed"]["seconds"] < 25
    assert result["killed"]["blocks are free"] == [True]


@pytest.mark.slow
def test_a_pool_outlives_its_engine(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    case = {"model": model(tmp_path), "backend": "mooncake", "requests": 12, "harms": ["master killed"]}
    program = [sys.executable, str(HERE / "store_cases.py"), json.dumps(case)]
    tools = str(HERE.parent / "tools")
    done = npus.run(2, *program, memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS="", PYTHONPATH=tools)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    print(result)
    assert result["filled"]["ended"] == {"length": 24}
    assert result["restart"]["not loaded"] == []
    assert result["restart"]["chunks"]["loaded (mooncake)"] > 10
    assert result["master killed"]["chunks"]["no answer (mooncake)"] > 0
    for phase in ("restart", "master killed"):
        record_property(f"seconds of {phase}", result[phase]["seconds"])
        assert result[phase]["ended"] == {"length": 12}
        assert result[phase]["different"] == []
        assert result[phase]["blocks are free"]
    assert result["master killed"]["seconds"] < 15
    assert result["left in /dev/shm"] == []


def model(directory: Path) -> str:
    """A Qwen3 of random weights with two key heads; in float32 another order of sums moves no choice."""
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
