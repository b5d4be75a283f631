# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The load format ascend_peer with real models: the same weights by every strategy, and the tokens
of transformers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus
from harness.engines.vllm_runner import V2_ALONE
from harness.models import fp8, quantize
from harness.models.quantize import Spec

PROGRAM = checkout.PROGRAMS / "load_weights.py"
OF_LAYOUTS = checkout.PROGRAMS / "load_weights_in_layouts.py"
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
FP8_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_experts": 8,
    "moe_intermediate_size": 512,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
}
DIES = [f"dies at {tenth}0 %" for tenth in range(10)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("loading")
    for seed, name in enumerate(("plain", "other")):
        torch.manual_seed(seed)
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).to(
            torch.bfloat16
        ).save_pretrained(directory / name)
    spec = Spec(8, "dynamic")
    quantize.quantize(
        directory / "plain",
        directory / "quantized",
        "ascend",
        lambda name: spec if "_proj" in name else None,
        dtype=torch.bfloat16,
        inputs={},
    )
    fp8.make(directory, "fp8", **FP8_SHAPE)
    case = layouts.case("loading", layouts.ADDER, {})
    done = npus.run(
        1, sys.executable, str(PROGRAM), str(directory), json.dumps(case), VLLM_PLUGINS=""
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = npus.results(done.stdout)
    return dict(record)


def test_every_strategy_gives_the_same_weights(result: dict[str, Any]) -> None:
    for way in ("threads", "threads, pinned", "runai_streamer", "runai_streamer, pinned"):
        assert result[way] == {"digest": result["default"], "said": result[way]["said"]}
    assert result["peer"]["digest"] == result["default"]
    assert result["sharded state"]["digest"] == result["default"]
    assert result["quantized"]["digest"] == result["quantized default"] != result["default"]


@pytest.mark.parametrize(("target", "bytes_each"), [("dequantize", 2), ("W8A8_DYNAMIC", 1)])
def test_fp8_is_converted_layer_by_layer(
    result: dict[str, Any], target: str, bytes_each: int
) -> None:
    """The most memory while loading is that of the converted model and two layers."""
    results = result["fp8"][target]
    layer = (
        bytes_each
        * FP8_SHAPE["hidden_size"]
        * (3 * FP8_SHAPE["num_experts"] * FP8_SHAPE["moe_intermediate_size"] + 768)
    )
    print(
        f"{target}: {results['most'] / 2**20:.1f} MiB, at the end {results['final'] / 2**20:.1f}, a"
        f" layer {layer / 2**20:.1f}"
    )
    assert results["final"] > FP8_SHAPE["num_hidden_layers"] * layer
    assert results["most"] <= results["final"] + 2 * layer


def test_dequantized_fp8_is_the_checkpoint_bit_for_bit(result: dict[str, Any]) -> None:
    assert (
        result["fp8"]["dequantize"]["digest"]
        == result["fp8 plain"]["digest"]
        != result["fp8"]["W8A8_DYNAMIC"]["digest"]
    )


@pytest.mark.parametrize("case", ["peer", "quantized"])
def test_peer_is_named(result: dict[str, Any], case: str) -> None:
    assert result[case]["said"][0].rpartition(":")[0] == "weights loaded from peer 127.0.0.1"


@pytest.mark.parametrize("case", DIES)
def test_peer_that_dies_leaves_the_weights_of_the_next_strategy(
    result: dict[str, Any], case: str
) -> None:
    assert result[case]["digest"] == result["default"]
    (line,) = [each for each in result[case]["said"] if "cannot load" in each]
    assert line.startswith("cannot load weights by peer: 127.0.0.1:")
    assert line.endswith("; falling back to: default")
    assert "the peer" in line


def test_dead_peer_without_another_strategy_is_a_clear_error(result: dict[str, Any]) -> None:
    error = result["dies, and no other strategy"]["error"]
    assert error.startswith("no strategy could load the weights of ")
    assert "peer: 127.0.0.1:" in error


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("other weights", "its weights differ: checkpoint: the peer has "),
        ("other dtype", "its weights differ: dtype: the peer has bfloat16, this engine float16"),
        ("other quantization", "quantization: the peer has ascend, this engine None"),
        ("quantized sharded state", "--load-format sharded_state supports unquantized weights: "),
        ("asleep", "the peer refused: the engine is asleep or not ready"),
    ],
)
def test_peer_that_cannot_serve_is_refused(result: dict[str, Any], case: str, message: str) -> None:
    assert message in result[case]["error"]


def test_engine_from_a_peer_has_transformers_tokens(result: dict[str, Any]) -> None:
    assert layouts.compare(layouts.ADDER, "bfloat16", result["answers"])[:2] == (33, 0)
    assert any(line.startswith("weights loaded from peer") for line in result["engine said"])
    assert any(line.startswith("serving 0.0") for line in result["engine said"])


def test_engine_loaded_from_a_peer_serves_others_after_sleep(
    result: dict[str, Any],
) -> None:
    assert result["from the engine"]["digest"] == result["awake"]["digest"]


@pytest.mark.skipif(
    V2_ALONE, reason="vLLM has no pipelines under its external launcher with the V2 model runner"
)
def test_weights_are_loaded_only_from_the_same_layout(tmp_path: Path) -> None:
    """A mixture of experts; data-parallel engines without expert parallelism each hold a different
    shard of every expert."""
    model = layouts.make("qwen3-moe", tmp_path)
    done = npus.run(
        2,
        sys.executable,
        str(OF_LAYOUTS),
        str(model),
        VLLM_PLUGINS="",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (ranks,) = npus.results(done.stdout)
    names = [name for name in ranks[0] if " from " not in name]
    assert len(names) == 4
    for mine, other in zip(ranks, ranks[::-1], strict=True):
        for name in names:
            assert mine[name] != other[name]
            for peer in names:
                actual = mine[f"{name} from {peer}"]
                assert actual == mine[name] if name == peer else "its weights differ: " in actual
