# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sizes compared with models that transformers builds, and the command. The project's tests compare
modelled times with figures published for real NPUs."""

import dataclasses
import json
import re
import tomllib
from importlib import resources

import pytest
import torch
import transformers
from ascend_cli import figures, main
from ascend_cli.plan import estimate, laws, model

QWEN3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "Qwen3-8B": transformers.Qwen3Config(
        num_hidden_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        intermediate_size=12288,
        **QWEN3,
    ),
    "Qwen3-14B": transformers.Qwen3Config(
        num_hidden_layers=40,
        hidden_size=5120,
        num_attention_heads=40,
        intermediate_size=17408,
        **QWEN3,
    ),
    "Qwen3-32B": transformers.Qwen3Config(
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=64,
        intermediate_size=25600,
        **QWEN3,
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        **{**QWEN3, "num_key_value_heads": 4},
    ),
    "Llama-3.2-1B": transformers.LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Mixtral-8x7B": transformers.MixtralConfig(),
    "DeepSeek-V3": transformers.DeepseekV3Config(),
    "DeepSeek-V3.2": transformers.DeepseekV32Config(),
    "GLM-5 with shared selections": transformers.GlmMoeDsaConfig(index_topk_freq=4),
    "DeepSeek-V2-Lite": transformers.DeepseekV2Config(
        num_hidden_layers=27,
        hidden_size=2048,
        num_attention_heads=16,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        vocab_size=102400,
    ),
    "opt": transformers.OPTConfig(
        hidden_size=512, ffn_dim=2048, num_hidden_layers=4, num_attention_heads=8
    ),
    "Qwen3-Next": transformers.Qwen3NextConfig(),
    "Qwen3.5": transformers.Qwen3_5TextConfig(),
}


def sizes_of(config) -> model.Model:
    return model.from_config(config.to_dict())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "opt"])
def test_weights_are_as_many_as_transformers_makes(name):
    with torch.device("meta"):
        reference_model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    real = sum(parameter.numel() for parameter in set(reference_model.parameters()))
    assert sizes_of(CONFIGS[name]).parameters == pytest.approx(real, rel=1e-3)


def test_indexers_have_keys_of_their_own():
    assert sizes_of(CONFIGS["DeepSeek-V3.2"]).kv == 512 + 64 + 128
    shared = CONFIGS["GLM-5 with shared selections"].to_dict()
    num_full = shared.pop("indexer_types").count("full")
    assert num_full == 21
    assert model.from_config(shared).kv == 512 + 64 + 128 * num_full // 78


def test_chips_are_those_of_the_emulator():
    """Both packages have these figures, because the platform never imports the emulator."""
    emulated = tomllib.loads((resources.files("ascend_emulator") / "chips.toml").read_text())
    common, _ = emulated.pop("all"), emulated.pop("only")
    emulated.pop("Ascend910A")  # plan has no figures of it
    of_names = {name: figures.figures_of(name) for name in emulated}
    assert {chip.name for chip in of_names.values()} == figures.FIGURES.keys()
    for name, chip in of_names.items():
        data = common | emulated[name]
        assert (chip.memory_gib, chip.bandwidth_gbs) == (data["memory_gib"], data["bandwidth_gbs"])
        tflops = data["cube_cores"] * data["cube_flops_per_cycle"] * data["clock_ghz"] / 1e3
        assert chip.tflops == pytest.approx(tflops, rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("npus", [1, 2, 6, 16])
def test_layouts_are_valid_and_hold_all_weights(name, npus):
    sizes = sizes_of(CONFIGS[name])
    result = list(estimate.layouts(sizes, npus))
    assert len(set(result)) == len(result)
    for layout in result:
        assert layout.npus == npus
        assert sizes.heads % layout.tensor == 0
        one = estimate.estimate(sizes, figures.FIGURES["Ascend910B1"], layout, estimate.Load())
        copies = layout.data if not sizes.experts else 1
        assert one.weights * npus / copies >= 2 * (sizes.parameters - sizes.head) * 0.99
        assert bool(one.obstacle) == (not one.modelled)


def test_kv_cache_capacity_by_hand():
    """Qwen3-8B on one 64 GiB NPU with 16 bits: 36 layers of 2 x 8 x 128 elements per token."""
    sizes = sizes_of(CONFIGS["Qwen3-8B"])
    one = estimate.estimate(
        sizes, figures.FIGURES["Ascend910B1"], estimate.Layout(1, 1, 1), estimate.Load()
    )
    cache = 64 * 2**30 * 0.92 - 2 * sizes.parameters - 3 * 2**30
    assert one.kv_tokens == int(cache / (36 * 2 * 8 * 128 * 2))
    half = estimate.estimate(
        sizes, figures.FIGURES["Ascend910B1"], estimate.Layout(1, 1, 1), estimate.Load(kv_bytes=1)
    )
    assert half.kv_tokens == pytest.approx(2 * one.kv_tokens, abs=2)


def test_states_have_blocks_as_long_as_attention_has():
    """Qwen3-Next: 36 states of 32 heads in 1 MiB, and blocks of 1024 tokens, whose keys are as
    large; with TP4 512 tokens."""
    sizes = sizes_of(CONFIGS["Qwen3-Next"])
    assert (sizes.linear, sizes.state) == (36, 2**20)
    for ranks, tokens in ((1, 1024), (2, 1024), (4, 512)):
        of_rank = estimate._Calculation(
            sizes, figures.FIGURES["Ascend910B1"], estimate.Layout(ranks, 1, 1), estimate.Load()
        )
        block = tokens * 2 * 256 * max(2 // ranks, 1) * 2
        assert of_rank.kv(1) == of_rank.kv(tokens) == 48 * block
        assert of_rank.kv(tokens + 1) == 60 * block


def test_bytes_sent_by_hand():
    """TP2: two all-reduces per layer, each of which sends half a row twice."""
    sizes = sizes_of(CONFIGS["Qwen3-8B"])
    load, chip = estimate.Load(), figures.FIGURES["Ascend910B1"]
    assert estimate.estimate(sizes, chip, estimate.Layout(1, 1, 1), load).sent == 0
    assert estimate.estimate(sizes, chip, estimate.Layout(2, 1, 1), load).sent == 36 * 2 * 4096 * 2
    assert estimate.estimate(sizes, chip, estimate.Layout(1, 2, 1), load).sent == 4096 * 2


def speeds(one) -> dict[str, float]:
    """Tokens per second by regime; 0 for a layout that does not fit."""
    return {
        regime: one.modelled[regime].tokens_per_second if one.modelled else 0.0
        for regime in laws.HOSTS
    }


def test_more_of_a_resource_is_never_slower():
    sizes = sizes_of(CONFIGS["Qwen3-32B"])
    load = estimate.Load(input=512, output=128)
    chip = figures.FIGURES["Ascend910B3"]
    for layout in estimate.layouts(sizes, 4):
        before = speeds(estimate.estimate(sizes, chip, layout, load))
        for field in ("memory_gib", "bandwidth_gbs", "tflops", "link_gbs"):
            better = dataclasses.replace(chip, **{field: getattr(chip, field) * 2})
            after = speeds(estimate.estimate(sizes, better, layout, load))
            assert all(after[regime] >= before[regime] for regime in laws.HOSTS)


@pytest.fixture
def saved(tmp_path):
    CONFIGS["Qwen3-8B"].save_pretrained(tmp_path)
    return str(tmp_path)


def test_command(saved, capsys):
    assert main.main(["plan", saved, "--soc", "Ascend910B3", "--npus", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("4 x Ascend910B3 (64 GiB, 1600 GB/s, 295 TFLOPS)")
    fastest = [re.findall(r"(\d+)-(\d+)(?= )", line)[2] for line in lines[3:9]]
    high = [int(each[1]) for each in fastest]
    assert high == sorted(high, reverse=True)
    assert all(int(low) < int(up) for low, up in fastest)
    assert "modelled" in lines[9]
    assert [line.partition(":")[0] for line in lines[10:13]] == [
        "modelled device",
        "modelled tuned host",
        "modelled typical host",
    ]
    assert lines[10].endswith("fitted on public rows of Ascend910_93 and assumed for Ascend910B3")
    assert lines[-1].startswith("best if tuned: vllm serve")
    assert main.main(["plan", saved, "--soc", "Ascend910B3", "--npus", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    ranges = [one["modelled"]["tuned"]["tokens_per_second"] for one in plan["layouts"]]
    assert [round(each[1]) for each in ranges] == high
    assert set(plan["origins"]) == {"device", "tuned host", "typical host"}


def test_every_time_is_a_range_with_an_origin():
    """No modelled value is printed without its range: the columns of both regimes are the same."""
    assert set(laws.BANDS) == set(laws.HOSTS) == set(laws.HOST_ORIGINS)
    for band in laws.BANDS.values():
        assert all(0 < low < high for low, high in band.values())
    for origin in laws.FITTED.origins(figures.FIGURES["Ascend910B3"]).values():
        assert "fitted" in origin or "assumed" in origin


def test_a_typical_step_waits_for_the_host():
    sizes, chip = sizes_of(CONFIGS["Qwen3-8B"]), figures.FIGURES["Ascend910_93"]
    load = estimate.Load(1, 128, 128)
    one = estimate.estimate(sizes, chip, estimate.Layout(1, 1, 1), load).modelled
    assert one["typical"].bound == "host"
    assert one["typical"].step_ms == laws.HOSTS["typical"].step_ms
    assert one["tuned"].bound == "matmuls"
    assert one["tuned"].step_ms < one["typical"].step_ms
    eager = dataclasses.replace(load, eager=True)
    slow = estimate.estimate(sizes, chip, estimate.Layout(1, 1, 1), eager).modelled["tuned"]
    assert slow.step_ms == pytest.approx(36 * laws.HOSTS["tuned"].eager_ms)


def test_drafts_cost_a_part_of_what_they_save():
    sizes, chip = sizes_of(CONFIGS["Qwen3-32B"]), figures.FIGURES["Ascend910_93"]
    layout = estimate.Layout(4, 1, 1)
    one, three = (
        estimate.estimate(sizes, chip, layout, estimate.Load(8, drafts=drafts)).modelled["tuned"]
        for drafts in (0, 3)
    )
    accepted = sum(laws.FITTED.accepted**draft for draft in (1, 2, 3))
    assert three.step_ms > one.step_ms
    assert one.token_ms / (1 + accepted) < three.token_ms < one.token_ms


@pytest.mark.parametrize(
    ("printed", "chip"),
    [
        ("910B3", "Ascend910B3"),
        ("ascend910b4", "Ascend910B4"),
        ("910B4-1", "Ascend910B4-1"),
        ("Ascend910B4-1", "Ascend910B4-1"),
        ("Ascend910B2C", "Ascend910B2"),
        ("Ascend910_9391", "Ascend910_93"),
        ("A3", "Ascend910_93"),
        ("Ascend910C", "Ascend910_93"),
        ("310P3", "Ascend310P3"),
        ("950", "Ascend950PR"),
        ("Ascend950DT_9591", "Ascend950DT"),
        ("Ascend310P", "Ascend310P3"),
        # On A3 and on the first generation npu-smi prints this; A2 has five chips.
        ("Ascend910", None),
        ("910B", None),
        ("A2", None),
        ("", None),
    ],
)
def test_names_that_machines_print(printed, chip):
    result = figures.figures_of(printed)
    assert (result and result.name) == chip
    if chip == "Ascend910B4-1":
        assert result.memory_gib == 64


SMALL = ["--gpu-memory-utilization", "0.15"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--soc", "910B4", "--npus", "1", "--input", "40000"],
            "--input and --output are 40256 tokens together; ",
        ),
        (
            ["--soc", "H100", "--npus", "1"],
            "unknown chip 'H100'; fix: --soc with one of: Ascend910B1",
        ),
        (
            ["--soc", "Ascend910B4", "--npus", "1", *SMALL],
            "per NPU; fix: --npus with more, or --quantization with one of: w8a8, w8a16, w4a16, w4a8",
        ),
        (
            ["--soc", "910B4", "--npus", "1", *SMALL, "--quantization", "w8a8"],
            "per NPU; fix: --npus with more, or --quantization with one of: w4a16, w4a8",
        ),
        (
            ["--soc", "910B4", "--npus", "1", *SMALL, "--quantization", "w4a8"],
            "per NPU; fix: --npus with more\n",
        ),
        (
            ["--soc", "Ascend910B4", "--npus", "1", "--requests", "0"],
            "--requests is 0; fix: set 1 or more",
        ),
        (
            ["--soc", "Ascend910B4", "--npus", "1", "--gpu-memory-utilization", "92"],
            "is 92.0; fix: set more than 0 and at most 1",
        ),
        (
            ["--soc", "Ascend910B4", "--npus", "1", "--speculative-tokens", "-5"],
            "--speculative-tokens is -5; fix: set 0 or more",
        ),
    ],
)
def test_errors_are_one_line(saved, capsys, options, message):
    assert main.main(["plan", saved, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: "),
        ("{", "cannot be read: Expecting property name"),
        ("[]", "cannot be read: 'list' object is not a mapping; fix: "),
        ("{}", "in the configuration; fix: "),
        (
            json.dumps(CONFIGS["Qwen3-8B"].to_dict() | {"intermediate_size": [1024, 2048]}),
            "qwen3: intermediate_size is [1024, 2048]; supported: a number, the same in each layer",
        ),
    ],
)
def test_configurations_that_cannot_be_planned(tmp_path, capsys, text, message):
    if text is not None:
        tmp_path.joinpath("config.json").write_text(text)
    options = "--soc", "Ascend910B4", "--npus", "1"
    assert main.main(["plan", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert (error.count("fix: "), error.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hybrid_override_pattern": "M-M*"}, "the layers that hybrid_override_pattern describes"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4: plan does not read compressed KV caches"),
        ({"model_type": "minimax_m3_text"}, "plan does not read attention over selected blocks"),
        ({"head_dims": [64] * 35 + [128]}, "head_dims, which differs between layers"),
        ({"num_experts": 8}, "8 experts, and no num_experts_per_tok, moe_topk or top_k_experts"),
    ],
)
def test_models_whose_layers_are_not_read_are_refused(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        model.from_config(CONFIGS["Qwen3-8B"].to_dict() | changed)
    assert str(error.value).endswith("fix: plan another model")


def test_other_names_of_the_number_of_experts():
    """Gemma 4 has top_k_experts, and GLM a list of the layers with experts."""
    plain = CONFIGS["Qwen3-30B-A3B"].to_dict()
    named = plain | {"top_k_experts": plain.pop("num_experts_per_tok")}
    named.pop("num_experts_per_tok", None)
    assert model.from_config(named).chosen == 8
    kinds = ["dense"] * 3 + ["sparse"] * 45
    assert model.from_config(named | {"mlp_layer_types": kinds}).mixed == 45


@pytest.mark.parametrize(
    ("changed", "longest"),
    [
        ({}, 32768),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": None}, 0),
    ],
)
def test_tokens_of_a_request(changed, longest):
    assert model.from_config(CONFIGS["Qwen3-8B"].to_dict() | changed).longest == longest


WEIGHTS = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (None, "none"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "none"),
        ({"quant_method": "awq", "bits": 4}, "w4a16"),
        ({"quant_method": "gptq", "bits": 8}, "w8a16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": WEIGHTS, "input_activations": WEIGHTS}},
            },
            "w8a8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": WEIGHTS | {"type": "float"}}},
            },
            "none",
        ),
    ],
)
def test_scheme_of_a_checkpoint_is_the_default(tmp_path, capsys, settings, scheme):
    config = CONFIGS["Qwen3-8B"].to_dict() | {"quantization_config": settings}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    options = ["plan", str(tmp_path), "--soc", "910B3", "--npus", "1"]
    assert main.main(options) == 0
    assert f"; quantization {scheme}\n" in capsys.readouterr().out
    assert main.main([*options, "--quantization", "w8a16"]) == 0
    assert "; quantization w8a16\n" in capsys.readouterr().out


def test_a_list_with_a_number_for_each_layer():
    """Hunyuan-A13B has such lists."""
    plain = CONFIGS["Qwen3-30B-A3B"].to_dict()
    names = "moe_intermediate_size", "num_experts_per_tok"
    lists = {name: [plain[name]] * plain["num_hidden_layers"] for name in names}
    assert model.from_config(plain | lists) == model.from_config(plain)


def test_unsupported_models_are_refused():
    with pytest.raises(ValueError, match="conv are not supported"):
        model.from_config(
            CONFIGS["Qwen3-8B"].to_dict() | {"layer_types": ["conv", "full_attention"]}
        )
    with pytest.raises(ValueError, match="an encoder are not supported"):
        sizes_of(transformers.T5Config())


def test_experts_are_sharded_over_the_replicas():
    """vLLM has one group of tensor and data parallelism for experts, whole (EP) or in slices; other
    weights are per replica."""
    sizes = sizes_of(CONFIGS["Qwen3-30B-A3B"])
    chip = figures.FIGURES["Ascend910_93"]
    for expert in (False, True):
        one = estimate.estimate(sizes, chip, estimate.Layout(1, 1, 4, expert), estimate.Load())
        assert (
            one.weights
            == 2 * (sizes.dense + 2 * sizes.head)
            + 2 * sizes.mixed * sizes.experts * sizes.expert / 4
        )
