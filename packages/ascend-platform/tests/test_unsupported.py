# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of vLLM that are refused by name."""

import re
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.config import (
    features,
    model_runner,
    resolve,
    runners,
    unsupported,
)
from ascend_platform.plugins import registry, slots
from ascend_platform.state_layers import features as state_features
from harness.engines.configuration import engine_config
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.plugins import load_general_plugins


def row(name: str) -> features.Feature:
    """The only feature whose name begins like this."""
    (result,) = (each for each in features.rows() if each.name.startswith(name))
    return result


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, r"KV cache dtypes other than the model's \(fp8\)"),
        # the model is bfloat16
        ({"kv_cache_dtype": "float16"}, r"KV cache dtypes other than the model's \(float16\)"),
        ({"cpu_offload_gb": 1}, "weight offloading"),
        ({"offload_group_size": 2}, "weight offloading"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_dbo": True}, "dual batch overlap"),
        ({"ubatch_size": 2}, "dual batch overlap"),
        (
            {"compilation_config": {"pass_config": {"fuse_act_quant": True}}},
            "fusions by torch.compile other than",
        ),
        ({"enable_layerwise_nvtx_tracing": True}, "--enable-layerwise-nvtx-tracing"),
        ({"moe_backend": "triton"}, r"kernels of other devices \(--moe-backend triton\)"),
        (
            {"mamba_backend": "flashinfer"},
            r"kernels of other devices \(--mamba-backend flashinfer\)",
        ),
        *(
            (
                {"weight_transfer_config": {"backend": backend}},
                rf"weight transfer of CUDA devices .* \({backend}\)",
            )
            for backend in ("nccl", "sparse_nccl", "nccl_m2n", "sharded_rdt")
        ),
        ({"profiler_config": {"profiler": "cuda"}}, r"profilers other than torch \(cuda\)"),
    ],
)
def test_unsupported_features_are_refused_in_one_line(model, arguments, named):
    with pytest.raises(ValueError, match=rf"does not support [^\n]*{named}[^\n]* yet"):
        engine_config(model(), **arguments)


@pytest.mark.parametrize("method", ["ascend", "fp8"])
def test_quantized_models_without_the_wheel_are_refused(model, monkeypatch, tmp_path, method):
    load_general_plugins()
    monkeypatch.delitem(slots._offers, "quantization")
    monkeypatch.delitem(registry._statuses, "ascend-quantization")
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    path = model(quantization_config={"quant_method": "fp8"}) if method == "fp8" else model()
    if method == "ascend":
        (tmp_path / "quant_model_description.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=(
            rf"the model is quantized \({method}\), which needs ascend-quantization, which is off"
            r" \(filtered out by VLLM_PLUGINS\); fix: export VLLM_PLUGINS=ascend,ascend_quant"
        ),
    ):
        engine_config(path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(
            (
                {"quantization": method},
                (
                    f"--quantization {method} is for checkpoints that are quantized so, .*; fix:"
                    " remove "
                ),
            )
            for method in ("fp8", "gpt_oss_mxfp4", "compressed-tensors")
        ),
        (
            {"compilation_config": {"mode": 3, "backend": "inductor"}},
            "Inductor is not supported on Ascend NPUs; fix: remove ",
        ),
    ],
)
def test_options_of_other_devices_are_refused_at_start_up(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        engine_config(model(), **arguments)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("sleep_mode_backend", "criu", "--sleep-mode-backend criu"),
        ("sleep_mode_offload_cudagraph", True, "--sleep-mode-offload-cudagraph"),
        ("enable_nccl_comm_suspend", True, "--enable-nccl-comm-suspend"),
    ],
)
def test_sleep_options_of_other_devices_are_refused(model, option, value, named):
    config = engine_config(model(), enable_sleep_mode=True)
    if not hasattr(config.model_config, option):
        pytest.skip(f"this vLLM has no --{option}")
    setattr(config.model_config, option, value)
    with pytest.raises(ValueError, match=rf"sleep options of other devices \({named}\) yet"):
        unsupported.check_features(config)


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("VLLM_USE_HW_AGNOSTIC", r"VLLM_USE_HW_AGNOSTIC \(layers other than "),  # since vLLM 0.32
        ("VLLM_BATCH_INVARIANT", "batch invariance"),
    ],
)
def test_unsupported_environment_features_are_refused(model, monkeypatch, variable, named):
    if not hasattr(envs, variable):
        pytest.skip(f"this vLLM has no {variable}")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=rf"does not support [^\n]*{named}[^\n]* yet"):
        engine_config(model())


@pytest.mark.parametrize(
    ("dtype", "norm", "named"),
    [("float16", True, "2.5"), ("bfloat16", True, ""), ("float16", False, "")],
)
def test_sandwich_norms_are_refused_in_float16(dtype, norm, named):
    text = SimpleNamespace(sandwich_norm=norm, routed_scaling_factor=2.5)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, dtype=f"torch.{dtype}")
    )
    feature = row("sandwich norms")
    assert feature.fix == "--dtype bfloat16"
    assert named in feature.asked(config)
    assert bool(feature.asked(config)) == bool(named)


def test_unsupported_models_with_states_are_refused_by_name():
    model_config = SimpleNamespace(
        is_hybrid=True, is_attention_free=False, architecture="BailingMoeV2_5ForCausalLM"
    )
    cache = SimpleNamespace(mamba_cache_mode="align", use_replayssm=False, kv_offloading_size=None)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config = SimpleNamespace(
        model_config=model_config,
        cache_config=cache,
        parallel_config=parallel,
        kv_transfer_config=None,
    )
    config.speculative_config = None
    assert state_features.other_architecture(config) == "BailingMoeV2_5ForCausalLM"
    model_config.architecture = "Qwen3NextForCausalLM"
    assert (state_features.other_architecture(config), state_features.other_options(config)) == (
        "",
        "",
    )
    config.speculative_config, cache.kv_offloading_size = "drafts", 1.0
    assert state_features.other_options(config).startswith(
        "--kv-offloading-size, prefix caching and draft tokens; fix: --no-enable-prefix"
    )


def test_unsupported_prefill_context_parallelism_is_refused(monkeypatch):
    """Like vLLM's ``PCPManager.validate_config``, before workers start."""
    parallel = {
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_eplb": False,
    }
    attributes = {
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "runner_type": "generate",
        "supports_multimodal_inputs": False,
        "uses_mrope": False,
        "enable_prompt_embeds": False,
        "hf_text_config": SimpleNamespace(),
    }
    model = SimpleNamespace(**attributes)
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model)
    config.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    config.speculative_config = config.lora_config = config.kv_transfer_config = None
    config.additional_config = {}
    runner = model_runner.Choice(True, "a test")
    monkeypatch.setattr(model_runner, "choice", lambda config: runner)
    other_prefill_context = row("prefill context parallelism").asked
    assert not other_prefill_context(config)
    for name, value, named in (
        ("is_encoder_decoder", True, "encoder-decoder models"),
        ("is_hybrid", True, "state-space or linear attention layers"),
        ("runner_type", "pooling", "pooling models"),
        ("supports_multimodal_inputs", True, "images, audio and video"),
        ("uses_mrope", True, "M-RoPE"),
        ("enable_prompt_embeds", True, "prompts given as embeddings"),
        (
            "hf_text_config",
            SimpleNamespace(attention_chunk_size=128),
            "chunked local attention",
        ),
    ):
        setattr(model, name, value)
        assert other_prefill_context(config) == named
        setattr(model, name, attributes[name])
    for name, named in (
        ("speculative_config", "speculative decoding"),
        ("lora_config", "LoRA"),
        ("kv_transfer_config", "KV connectors"),
    ):
        setattr(config, name, object())
        assert other_prefill_context(config) == named
        setattr(config, name, None)
    for name in ("index_cache", "latent_cache"):
        config.additional_config = {"ascend": {"platform": {name: "int8"}}}
        refused = other_prefill_context(config)
        assert refused == "int8 caches of sparse attention"
    config.additional_config = {}
    config.parallel_config.data_parallel_size = 2
    assert other_prefill_context(config) == "data parallelism"
    runner = model_runner.Choice(False, "a test")
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    refused = other_prefill_context(config)
    assert refused.startswith("vLLM's V1 model runner, ")
    assert refused.endswith(", graph modes other than FULL_DECODE_ONLY")


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_routed_experts_are_refused_with_the_v1_runner(model):
    """vLLM refuses them on its own platforms, and leaves the check to others."""
    v1 = {"ascend": {"platform": {"model_runner": "v1"}}}
    named = (
        r"does not support --enable-return-routed-experts with vLLM's V1 model runner"
        r" \(additional_config\) yet; fix: [^\n]*0.33"
    )
    with pytest.raises(ValueError, match=named):
        engine_config(model(**EXPERTS), enable_return_routed_experts=True, additional_config=v1)
    engine_config(model(**EXPERTS), additional_config=v1)
    assert row("--enable-return-routed-experts").runners == features.V1


def test_lora_on_experts_is_refused_with_data_parallelism(model):
    directory = model(**EXPERTS)
    named = (
        r"does not support LoRA on experts beyond tensor and expert parallelism"
        r" \(--lora-target-modules without experts .*--fully-sharded-loras"
    )
    with pytest.raises(ValueError, match=named):
        engine_config(directory, enable_lora=True, fully_sharded_loras=True)
    expert_parallel = {"enable_lora": True, "enable_expert_parallel": True}
    config = engine_config(directory, **expert_parallel)
    other_lora_on_experts = row("LoRA on experts").asked
    assert other_lora_on_experts(config) == ""
    config.parallel_config.data_parallel_size = 2
    assert "data parallelism, whose ranks have" in other_lora_on_experts(config)
    config.lora_config.target_modules = ["q_proj"]
    assert other_lora_on_experts(config) == ""
    config.lora_config.target_modules, config.parallel_config.enable_eplb = None, True
    assert "--enable-eplb, which moves experts" in other_lora_on_experts(config)
    assert engine_config(model(), enable_lora=True).lora_config.target_modules is None


def test_experts_are_refused_on_a_chip_without_their_operators(model, ascend310p):
    with pytest.raises(
        ValueError,
        match=(
            r"mixture-of-experts models are not supported on Ascend310P3, which has no npu_moe_gat"
        ),
    ):
        engine_config(model(**EXPERTS))


def test_experts_of_data_parallel_engines_need_the_communicator(model, monkeypatch):
    monkeypatch.setattr(torch.npu, "device_count", lambda: 2)
    assert engine_config(
        model(**EXPERTS), data_parallel_size=2, enable_expert_parallel=True
    ).model_config.is_moe
    monkeypatch.setattr(slots, "_offers", {})
    assert engine_config(model(**EXPERTS)).model_config.is_moe
    with pytest.raises(ValueError, match="engines needs ascend-communicator, which is active"):
        engine_config(model(**EXPERTS), data_parallel_size=2, enable_expert_parallel=True)


def test_weight_transfer_by_hccl_is_refused_without_the_wheel(monkeypatch):
    config = SimpleNamespace(backend="hccl")
    unsupported.check_weight_transfer(config)
    monkeypatch.setattr(slots, "_offers", {})
    with pytest.raises(ValueError, match="weight transfer by hccl needs ascend-communicator"):
        unsupported.check_weight_transfer(config)


@pytest.mark.parametrize("way", ["nixl", "pynccl"])
def test_other_communicators_of_eplb_are_refused(way):
    """Also vLLM's own choice, where a package nixl is installed."""
    eplb = SimpleNamespace(communicator=way)
    parallel = SimpleNamespace(enable_eplb=True, eplb_config=eplb)
    config = SimpleNamespace(parallel_config=parallel)
    feature = row("expert load balancing")
    assert (feature.asked(config), feature.fix.split()[0]) == (way, "--eplb-config")
    eplb.communicator = "torch_gloo"
    assert not feature.asked(config)


def feature(name: str, *runners: str, fix: str = "") -> features.Feature:
    return features.Feature(name, lambda config: name in config.names, runners=runners, fix=fix)


@pytest.mark.parametrize(
    ("is_v2", "names", "end"),
    [
        (True, "a", "a with vLLM's V2 model runner (a test) yet; fix: use V1"),
        (True, "ab", "a with vLLM's V2 model runner (a test) yet; fix: leave it out"),
        (True, "ac", "a with vLLM's V2 model runner (a test) yet; fix: use V1"),
        (True, "b", ""),
        (False, "a", ""),
        (False, "b", "b with vLLM's V1 model runner (a test) yet; fix: use V2"),
        (True, "cd", "c, d yet; fix: leave it out; --option"),
        (False, "c", "c yet; fix: leave it out"),
    ],
)
def test_features_are_refused_by_runner(is_v2, names, end, monkeypatch):
    rows = [feature("a", "v2"), feature("b", "v1", fix="use V2"), feature("c", "v1", "v2")]
    rows.append(feature("d", "v1", "v2", fix="--option"))
    monkeypatch.setattr(features, "rows", lambda: rows)
    monkeypatch.setattr(runners, "has_v1", lambda: True)
    choice = model_runner.Choice(is_v2, "a test")
    monkeypatch.setattr(model_runner, "choice", lambda config: choice)
    config = SimpleNamespace(names=names, model_config=object())
    if not end:
        unsupported.check_features(config)
        return
    with pytest.raises(ValueError, match=rf"does not support {re.escape(end)}$"):
        unsupported.check_features(config)


@pytest.mark.parametrize("option", ["enable_trace_replay", "return_sampling_mask"])
@pytest.mark.parametrize("runner", ["v1", "auto"])
def test_options_that_v1_ignores_are_refused(model, option, runner):
    """V1 accepts and ignores them, so that it is no fix."""
    config = engine_config(
        model(), additional_config={"ascend": {"platform": {"model_runner": runner}}}
    )
    if not hasattr(config.model_config, option):
        pytest.skip(f"this vLLM has no {option}")
    setattr(config.model_config, option, True)
    with pytest.raises(
        ValueError,
        match=r"support (trace replay|sampling masks) \(kernel \w+\) yet; fix: leave it out$",
    ):
        unsupported.check_features(config)


def test_images_with_bidirectional_attention_are_not_split(model, monkeypatch):
    text = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    directory = model(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=text | {"model_type": "gemma3_text"},
        vision_config=vision
        | {"model_type": "siglip_vision_model", "num_attention_heads": 2, "image_size": 28},
    )
    messages: list[str] = []
    monkeypatch.setattr(resolve.logger, "warning", messages.append)
    whole = engine_config(directory, long_prefill_token_threshold=16).scheduler_config
    assert whole.disable_chunked_mm_input
    assert whole.long_prefill_token_threshold == 0
    assert messages == [
        "long_prefill_token_threshold is ignored: a step has all tokens of an image"
    ]
    options = {"limit_mm_per_prompt": {"image": 0}, "long_prefill_token_threshold": 16}
    text = engine_config(directory, **options)
    assert not text.scheduler_config.disable_chunked_mm_input
    assert text.scheduler_config.long_prefill_token_threshold == 16
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            is_mm_prefix_lm=True, architecture="Molmo2ForConditionalGeneration"
        )
    )
    assert row("bidirectional attention").asked(config)
    with pytest.raises(ValueError, match="decode context parallelism with bidirectional"):
        engine_config(directory, tensor_parallel_size=4, decode_context_parallel_size=2)
