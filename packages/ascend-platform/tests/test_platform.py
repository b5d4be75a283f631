# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""NPUPlatform through vLLM's own configuration: what it sets, what it refuses, what it says."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ascend_platform import extension, host
from ascend_platform.config import model_runner, state_layers, unsupported
from ascend_platform.platform import NPUPlatform
from ascend_platform.plugins import VARIABLES, slots
from harness.configuration import engine_config
from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.executor.ray_env_utils import get_driver_env_vars

DENSE = AttentionSelectorConfig(
    head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
)


def test_vllm_uses_it_as_its_platform():
    assert type(current_platform) is NPUPlatform
    assert current_platform.is_out_of_tree()


def test_v1_configuration_spawns_workers_and_graphs_decodes(model):
    config = engine_config(model())
    assert config.parallel_config.worker_cls == "ascend_platform.worker.worker.NPUWorker"
    assert config.compilation_config.mode is CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert config.use_v2_model_runner is False
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("asked", "mode", "graphs"),
    [
        ({"enforce_eager": True}, "NONE", "NONE"),
        ({"optimization_level": 0}, "NONE", "NONE"),
        ({"optimization_level": 3}, "VLLM_COMPILE", "FULL_AND_PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "NONE", "FULL"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "VLLM_COMPILE", "PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE", "mode": 0}}, "NONE", "NONE"),
    ],
)
def test_graphs_are_those_asked_for(model, asked, mode, graphs):
    compilation = engine_config(model(), **asked).compilation_config
    assert (compilation.mode.name, compilation.cudagraph_mode.name, compilation.backend) == (
        mode,
        graphs,
        "eager",
    )


def test_graphs_are_refused_with_a_queue_that_cannot_be_captured(model, monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(
        ValueError,
        match="captures no graphs with TASK_QUEUE_ENABLE=2; fix: export TASK_QUEUE_ENABLE=1, or",
    ):
        engine_config(model())
    engine_config(model(), enforce_eager=True)


def test_full_graphs_are_refused_where_each_launch_is_waited_for(model, monkeypatch):
    """A replay would wait for the graph, which waits for the step's sequence lengths, which are
    given after the launch."""
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    message = (
        "FULL_DECODE_ONLY is not supported with ASCEND_LAUNCH_BLOCKING=1, .*; fix: unset"
        " ASCEND_LAUNCH_BLOCKING, or"
    )
    with pytest.raises(ValueError, match=message):
        engine_config(model())
    engine_config(model(), enforce_eager=True)
    engine_config(model(), compilation_config={"cudagraph_mode": "PIECEWISE"})


@pytest.mark.parametrize(
    ("requests", "drafts"), [(100, 0), (100, 3), (37, 2), (256, 3), (250, 4), (600, 0)]
)
def test_the_largest_decode_step_is_captured(model, requests, drafts):
    """As a multiple of the tokens of a request; 256 requests with three draft tokens are above
    vLLM's limit of 512 tokens."""
    given = {"max_num_seqs": requests, "max_num_batched_tokens": 4096}
    if drafts:
        given["speculative_config"] = {
            "method": "ngram_gpu",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 3,
        }
    sizes = engine_config(model(), **given).compilation_config.cudagraph_capture_sizes
    tokens = requests * (1 + drafts)
    assert min(size for size in sizes if size >= tokens and size % (1 + drafts) == 0) - tokens < 16
    assert sizes[-1] <= max(2 * tokens, 512)
    assert sizes == sorted(set(sizes))
    fewer = {"cudagraph_capture_sizes": [1, 8]}
    assert engine_config(
        model(), compilation_config=fewer, **given
    ).compilation_config.cudagraph_capture_sizes == [1, 8]


@pytest.mark.parametrize(
    "asked",
    [{"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "FULL_AND_PIECEWISE"}, {"mode": 3}],
)
def test_lora_is_refused_where_the_model_is_compiled(model, asked):
    with pytest.raises(
        ValueError,
        match=r"LoRA is not supported with torch.compile, .*; supported: .*; fix: --compilation",
    ):
        engine_config(model(), enable_lora=True, compilation_config=asked)
    for mode in ("FULL", "FULL_DECODE_ONLY", "NONE"):
        engine_config(model(), enable_lora=True, compilation_config={"cudagraph_mode": mode})


def test_full_graphs_are_refused_if_attention_is_not_capturable(model):
    message = (
        "FULL needs attention that can be captured, and this model's is built-in PyTorch .*;"
        " supported: PIECEWISE, NONE"
    )
    with pytest.raises(Exception, match=message):
        engine_config(model(), dtype="float32", compilation_config={"cudagraph_mode": "FULL"})


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
        (
            {"weight_transfer_config": {"backend": "nccl"}},
            r"weight transfer of CUDA devices .* \(nccl\)",
        ),
        ({"profiler_config": {"profiler": "cuda"}}, r"profilers other than torch \(cuda\)"),
    ],
)
def test_unsupported_features_are_refused_in_one_line(model, arguments, named):
    with pytest.raises(ValueError, match=rf"does not support [^\n]*{named}[^\n]* yet"):
        engine_config(model(), **arguments)


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
    [("float16", True, "2.5; fix"), ("bfloat16", True, ""), ("float16", False, "")],
)
def test_sandwich_norms_are_refused_in_float16(dtype, norm, named):
    text = SimpleNamespace(sandwich_norm=norm, routed_scaling_factor=2.5)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, dtype=f"torch.{dtype}")
    )
    feature = next(each for each in unsupported.FEATURES if each.name.startswith("sandwich norms"))
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
    assert state_layers.other_architecture(config) == "BailingMoeV2_5ForCausalLM"
    model_config.architecture = "Qwen3NextForCausalLM"
    assert (state_layers.other_architecture(config), state_layers.other_options(config)) == ("", "")
    config.speculative_config, cache.kv_offloading_size = "drafts", 1.0
    assert state_layers.other_options(config).startswith(
        "--kv-offloading-size, prefix caching and draft tokens; fix: --no-enable-prefix"
    )


def test_unsupported_prefill_context_parallelism_is_refused(monkeypatch):
    """Same check as vLLM's ``PCPManager.validate_config``, before workers start."""
    parallel = {
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_eplb": False,
    }
    model = SimpleNamespace(use_mla=True, hf_text_config=SimpleNamespace())
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model)
    config.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    config.speculative_config = config.lora_config = config.kv_transfer_config = None
    runner = model_runner.Choice(True, "a test")
    monkeypatch.setattr(model_runner, "choice", lambda config: runner)
    assert not unsupported._other_prefill_context(config)
    model.hf_text_config.index_topk, config.parallel_config.data_parallel_size = 32, 2
    assert (
        unsupported._other_prefill_context(config)
        == "attention other than dense latent attention (MLA), data parallelism"
    )
    runner = model_runner.Choice(False, "a test")
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    refused = unsupported._other_prefill_context(config)
    assert refused.startswith("vLLM's V1 model runner, ")
    assert refused.endswith(", graph modes other than FULL_DECODE_ONLY")


def test_values_of_another_head_size_are_refused_by_name():
    text = SimpleNamespace(head_dim=192, v_head_dim=128, swa_head_dim=192, swa_v_head_dim=192)
    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture="MiMoV2FlashForCausalLM", hf_text_config=text)
    )
    assert unsupported._other_value_heads(config) == "192 and 128"
    text.head_dim = 128
    assert not unsupported._other_value_heads(config)


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
        r"does not support --enable-return-routed-experts with vLLM's V1 model runner \(fix:"
        r" [^\n]*0.33[^\n]*\) yet"
    )
    with pytest.raises(ValueError, match=named):
        engine_config(model(**EXPERTS), enable_return_routed_experts=True, additional_config=v1)
    engine_config(model(**EXPERTS), additional_config=v1)


def test_lora_on_experts_is_refused_with_expert_parallelism(model):
    directory = model(**EXPERTS)
    named = (
        r"does not support LoRA on experts beyond tensor parallelism \(--lora-target-modules"
        r" without experts .*expert parallelism"
    )
    expert_parallel = {"enable_lora": True, "enable_expert_parallel": True}
    with pytest.raises(ValueError, match=named):
        engine_config(directory, **expert_parallel)
    assert engine_config(
        directory, **expert_parallel, lora_target_modules=["q_proj"]
    ).lora_config.target_modules == ["q_proj"]
    assert engine_config(directory, enable_lora=True).lora_config.target_modules is None
    assert engine_config(model(), enable_lora=True).lora_config.target_modules is None


def test_experts_are_refused_on_a_chip_without_their_operators(model, ascend310p):
    with pytest.raises(
        ValueError,
        match=(
            r"mixture-of-experts models are not supported on Ascend310P3, which has no npu_moe_gat"
        ),
    ):
        engine_config(model(**EXPERTS))


def test_sliding_window_model_is_served_up_to_its_window(model):
    mistral = model(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    assert engine_config(mistral, disable_sliding_window=True).model_config.max_model_len == 64


def test_layout_with_too_many_npus_is_refused_in_one_line(model, monkeypatch):
    there = torch.npu.device_count()
    engine_config(model(), tensor_parallel_size=1)
    with pytest.raises(
        ValueError,
        match=(
            rf"needs {there + 1} NPUs \(tensor 1 x pipeline {there + 1} x data 1\) and {there} are"
            r" visible"
        ),
    ):
        engine_config(model(), pipeline_parallel_size=there + 1)
    with pytest.raises(
        ValueError,
        match=(
            rf"needs {there + 1} NPUs \(tensor 1 x pipeline 1 x data {there + 1}\) and {there} are"
        ),
    ):
        engine_config(model(), data_parallel_size=there + 1)
    process = multiprocessing.current_process()
    # It has its own part of all devices.
    monkeypatch.setattr(process, "_name", "EngineCore_DP0")
    engine_config(model(), data_parallel_size=there + 1)


def test_experts_of_data_parallel_engines_need_the_communicator(model, monkeypatch):
    monkeypatch.setattr(torch.npu, "device_count", lambda: 2)
    assert engine_config(
        model(**EXPERTS), data_parallel_size=2, enable_expert_parallel=True
    ).model_config.is_moe
    monkeypatch.setattr(slots, "_offers", {})
    assert engine_config(model(**EXPERTS)).model_config.is_moe
    with pytest.raises(ValueError, match="engines needs ascend-communicator, which is active"):
        engine_config(model(**EXPERTS), data_parallel_size=2, enable_expert_parallel=True)


def test_numa_binding_follows_the_topology_or_is_disabled(model, monkeypatch, log_lines, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    parallel = engine_config(model(), numa_bind=True).parallel_config
    assert (parallel.numa_bind, parallel.numa_bind_nodes) == (False, None)
    (line,) = [line for _, line in log_lines if "numa" in line]
    assert line.startswith("--numa-bind disabled: npu-smi info failed (")
    given = engine_config(model(), numa_bind=True, numa_bind_nodes=[0]).parallel_config
    assert (given.numa_bind, given.numa_bind_nodes) == (True, [0])
    monkeypatch.setattr(host, "numa_nodes", lambda: ([1, 0], ""))
    assert engine_config(model(), numa_bind=True).parallel_config.numa_bind is False
    assert "numactl is not installed" in log_lines[-2][1] + log_lines[-1][1]
    (tmp_path / "numactl").touch(mode=0o755)
    assert engine_config(model(), numa_bind=True).parallel_config.numa_bind_nodes == [1, 0]


def test_workers_are_bound_if_the_topology_is_known(model, monkeypatch, tmp_path):
    (tmp_path / "numactl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "numa_nodes", lambda: ([1, 0], ""))
    monkeypatch.setattr(host, "has_numa_nodes", lambda: True)
    assert engine_config(model()).parallel_config.numa_bind_nodes == [1, 0]
    off = {"additional_config": {"ascend": {"platform": {"numa_bind": False}}}}
    assert engine_config(model(), **off).parallel_config.numa_bind is False
    monkeypatch.setattr(host, "numa_nodes", lambda: ([], "npu-smi info failed"))
    assert engine_config(model()).parallel_config.numa_bind is False
    monkeypatch.setattr(host, "has_numa_nodes", lambda: False)
    monkeypatch.setattr(
        host, "numa_nodes", lambda: pytest.fail("npu-smi is called on a machine with one NUMA node")
    )
    assert engine_config(model()).parallel_config.numa_bind is False


@pytest.mark.parametrize(
    ("options", "engine", "refusal"),
    [
        (
            {"matmul_all_reduce": 1},
            {},
            "platform.matmul_all_reduce is 1; supported: true, false; fix: ",
        ),
        (
            {"matmul_all_reduce": True},
            {},
            "not supported with --tensor-parallel-size 1 on Ascend910B1; supported: 2, 4, 8",
        ),
        (
            {"matmul_all_reduce": True},
            {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
            "matmul_all_reduce is not supported with torch.compile; fix: remove it",
        ),
    ],
)
def test_options_of_performance_are_checked(model, options, engine, refusal):
    with pytest.raises(ValueError, match=refusal):
        engine_config(model(), additional_config={"ascend": {"platform": options}}, **engine)


def test_unknown_option_is_refused(model):
    with pytest.raises(ValueError, match="ascend has no key 'attentoin'; fix: use 'attention'"):
        engine_config(model(), additional_config={"ascend": {"attentoin": {}}})


def test_memory_is_not_asked_of_a_process_without_device():
    if not torch.npu.is_initialized():
        with pytest.raises(NotImplementedError, match="this process has no device context"):
            NPUPlatform.get_device_total_memory()
    torch.zeros(1, device="npu")
    assert NPUPlatform.get_device_total_memory() == extension.chip().memory > 0
    assert NPUPlatform.get_device_name() == extension.chip().name


def test_vllm_knows_the_family_s_environment_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    NPUPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_ASCEND_NO_SUCH_THING", "1")
    with pytest.raises(ValueError, match="VLLM_ASCEND_NO_SUCH_THING"):
        NPUPlatform.validate_environ(hard_fail=True)


def test_ray_leaves_each_node_its_own_and_keeps_what_is_given(model, monkeypatch):
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor import ray_utils

    secrets = {name for name in VARIABLES if name.endswith("SECRET")}
    for name in secrets:
        monkeypatch.setenv(name, "sixteen bytes or more")
    monkeypatch.setattr(
        ray_utils, "WORKER_SPECIFIC_ENV_VARS", set(ray_utils.WORKER_SPECIFIC_ENV_VARS)
    )
    config = engine_config(model(), distributed_executor_backend="ray", tensor_parallel_size=2)
    config.parallel_config.ray_runtime_env = {"env_vars": {"A": "1"}, "working_dir": "."}
    NPUPlatform.check_and_update_config(config)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HCCL_IF_IP", "10.0.0.1")
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    handed_on = get_driver_env_vars(ray_utils.WORKER_SPECIFIC_ENV_VARS)
    assert {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP", *secrets}.isdisjoint(handed_on)
    # data parallel's engines
    assert secrets.isdisjoint(get_env_vars_to_copy(exclude_vars=ray_utils.WORKER_SPECIFIC_ENV_VARS))
    assert handed_on["HCCL_BUFFSIZE"] == "300"
    variables = {"A": "1", "RAY_kill_child_processes_on_worker_exit": "0"}
    assert config.parallel_config.ray_runtime_env == {"env_vars": variables, "working_dir": "."}


def test_directory_too_long_for_sockets_is_refused_in_one_line(model, monkeypatch, tmp_path):
    directory = tmp_path / ("x" * 80)
    directory.mkdir()
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(
        ValueError, match=r"TMPDIR: .* has \d+ characters, .*; fix: export VLLM_RPC_BASE_PATH=/tmp"
    ):
        engine_config(model())
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(directory))
    with pytest.raises(ValueError, match=r"VLLM_RPC_BASE_PATH: .* has \d+ characters"):
        engine_config(model())


def test_specs_and_configs_can_be_created_without_an_engine(model):
    script = (
        "import sys; from vllm.platforms import current_platform as platform;"
        " platform.register_custom_kv_cache_specs(None); "
    )
    script += (
        "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry as registry;"
        " registry._ensure_registered(); "
    )
    script += "from vllm.config import KVTransferConfig, ModelConfig, VllmConfig; "
    script += "transfer = KVTransferConfig(kv_connector='AscendP2PConnector', kv_role='kv_both', "
    script += "kv_connector_extra_config={'insecure': True}); "
    script += (
        "VllmConfig(model_config=ModelConfig(sys.argv[1], skip_tokenizer_init=True),"
        " kv_transfer_config=transfer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model())], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_socket_directory_is_removed_with_the_main_process(model):
    script = "import os, sys; from vllm.engine.arg_utils import EngineArgs; "
    script += "EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config(); "
    script += (
        "print(os.environ['VLLM_RPC_BASE_PATH'], os.path.isdir(os.environ['VLLM_RPC_BASE_PATH']))"
    )
    environ = {
        name: value for name, value in os.environ.items() if name != "VLLM_RPC_BASE_PATH"
    } | {"TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", script, model()],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    directory, there = done.stdout.split()[-2:]
    assert (Path(directory).parent, there) == (Path("/tmp"), "True")
    assert not Path(directory).exists()
