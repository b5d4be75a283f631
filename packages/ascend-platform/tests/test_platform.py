# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""NPUPlatform through vLLM's own configuration: what it sets, what it refuses, what it says."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
import torch
from ascend_platform import extension, host
from ascend_platform.config import devices, model_runner, runners
from ascend_platform.errors import RefusedError
from ascend_platform.platform import NPUPlatform
from ascend_platform.plugins import VARIABLES, requirements
from harness.engines import scripts
from harness.engines.configuration import engine_config
from packaging.version import Version
from vllm.config import CompilationMode, CUDAGraphMode, KVTransferConfig
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


def test_graphs_are_refused_if_the_queue_cannot_be_captured(model, monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(
        ValueError,
        match="captures no graphs with TASK_QUEUE_ENABLE=2; fix: export TASK_QUEUE_ENABLE=1, or",
    ):
        engine_config(model())
    engine_config(model(), enforce_eager=True)


def test_full_graphs_are_refused_with_blocking_launches(model, monkeypatch):
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
    text_only = {"cudagraph_mode": "PIECEWISE", "cudagraph_mm_encoder": True}
    engine_config(model(), compilation_config=text_only)


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


PLACES = [host.NPUPlace("0000:c1:00.0", 1, 0, 1), host.NPUPlace("0000:01:00.0", 0, 0, 1)]


def test_numa_binding_follows_the_topology_or_is_disabled(model, monkeypatch, log_lines, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    parallel = engine_config(model(), numa_bind=True).parallel_config
    assert (parallel.numa_bind, parallel.numa_bind_nodes) == (False, None)
    (line,) = [line for _, line in log_lines if "numa" in line]
    assert line.startswith("--numa-bind disabled: npu-smi info failed (")
    given = engine_config(model(), numa_bind=True, numa_bind_nodes=[0]).parallel_config
    assert (given.numa_bind, given.numa_bind_nodes) == (True, [0])
    monkeypatch.setattr(host, "npu_places", lambda: (PLACES, ""))
    assert engine_config(model(), numa_bind=True).parallel_config.numa_bind is False
    assert "numactl is not installed" in log_lines[-2][1] + log_lines[-1][1]
    (tmp_path / "numactl").touch(mode=0o755)
    assert engine_config(model(), numa_bind=True).parallel_config.numa_bind_nodes == [1, 0]


def test_workers_are_bound_if_the_topology_is_known(model, monkeypatch, tmp_path):
    (tmp_path / "numactl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "npu_places", lambda: (PLACES, ""))
    monkeypatch.setattr(host, "has_numa_nodes", lambda: True)
    assert engine_config(model()).parallel_config.numa_bind_nodes == [1, 0]
    off = {"additional_config": {"ascend": {"platform": {"numa_bind": False}}}}
    assert engine_config(model(), **off).parallel_config.numa_bind is False
    monkeypatch.setattr(host, "npu_places", lambda: ([], "npu-smi info failed"))
    assert engine_config(model()).parallel_config.numa_bind is False
    monkeypatch.setattr(host, "has_numa_nodes", lambda: False)
    monkeypatch.setattr(
        host, "npu_places", lambda: pytest.fail("npu-smi is called on a machine with one NUMA node")
    )
    assert engine_config(model()).parallel_config.numa_bind is False


@pytest.mark.parametrize(
    ("visible", "ids", "nodes"),
    [
        (None, [1], [0]),
        (None, [1, 0], [0, 1]),
        ("4,6", [6], [0]),
        ("4,6", [4], [1]),
        ("4,6", [1], None),
    ],
)
def test_numa_nodes_are_those_of_device_ids(
    model, monkeypatch, tmp_path, log_lines, visible, ids, nodes
):
    (tmp_path / "numactl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "npu_places", lambda: (PLACES, ""))
    parallel = engine_config(model()).parallel_config
    if visible:
        monkeypatch.setenv(host.VISIBLE_NPUS, visible)
    parallel.numa_bind, parallel.assigned_physical_gpu_ids = True, ids
    devices.bind_to_numa_nodes(parallel, by_default=True)
    assert parallel.numa_bind == (nodes is not None)
    assert parallel.numa_bind_nodes == nodes
    if nodes is None:
        assert "--numa-bind disabled: NPU 1 of --device-ids is not visible" in log_lines[-1][1]


def test_type_of_an_option_is_checked(model):
    with pytest.raises(
        ValueError, match=r"platform\.shared_experts_stream is 1; supported: true, false; fix: "
    ):
        engine_config(
            model(), additional_config={"ascend": {"platform": {"shared_experts_stream": 1}}}
        )


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


def test_vllm_knows_the_environment_variables_of_the_family(monkeypatch):
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    NPUPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_ASCEND_NO_SUCH_THING", "1")
    with pytest.raises(ValueError, match="VLLM_ASCEND_NO_SUCH_THING"):
        NPUPlatform.validate_environ(hard_fail=True)


def test_a_misspelled_plugin_is_one_warning_of_a_start(model, monkeypatch, log_lines):
    engine_config(model())  # with the plugins loaded
    log_lines.clear()
    monkeypatch.setenv("VLLM_PLUGINS", "ascend,ascend_atention")
    engine_config(model())
    fix = "export VLLM_PLUGINS=ascend,ascend_attention"
    line = f"VLLM_PLUGINS: no plugin has the name ascend_atention; fix: {fix}"
    assert [each for each in log_lines if "VLLM_PLUGINS:" in each[1]] == [("WARNING", line)]


@pytest.mark.parametrize("variable", ["PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_with_kv_transfer_are_warned_of(
    model, monkeypatch, log_lines, variable
):
    transfer = KVTransferConfig(kv_connector="AscendP2PConnector", kv_role="kv_both")
    monkeypatch.setenv("VLLM_ASCEND_KV_SECRET", "sixteen bytes or more")
    monkeypatch.setenv(variable, "page_size:1g, expandable_segments: True")
    engine_config(model(), kv_transfer_config=transfer)
    (warning,) = [text for level, text in log_lines if "expandable_segments" in text]
    assert warning.startswith(f"{variable}=expandable_segments:True with --kv-transfer-config: ")
    assert f"; fix: unset {variable}" in warning
    log_lines.clear()
    engine_config(model())
    monkeypatch.setenv(variable, "expandable_segments:False")
    engine_config(model(), kv_transfer_config=transfer)
    assert not [text for _, text in log_lines if "expandable_segments" in text]


def test_without_the_v1_runner_the_line_says_what_is_needed(model, monkeypatch):
    """As after the removal of V1 from ascend-platform."""
    monkeypatch.setattr(runners, "has_v1", lambda: False)
    monkeypatch.setattr(requirements, "version", lambda name: versions[name])
    versions = {"ascend-platform": "0.2.0", "vllm": "0.32.0"}
    with pytest.raises(RefusedError) as old:
        model_runner._refuse_v1("V2 is supported from vLLM 0.33 on")
    build = "VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 pip install --no-binary vllm"
    assert str(old.value) == (
        "ascend-platform 0.2.0 has no V1 model runner, and its V2 model runner requires"
        f" vllm>=0.33, found 0.32.0; fix: {build} 'vllm>=0.33'"
    )
    monkeypatch.undo()
    monkeypatch.setattr(runners, "has_v1", lambda: False)
    if Version(requirements.version("vllm")) < Version("0.33"):
        with pytest.raises(ValueError, match="has no V1 model runner, and its V2 model runner"):
            engine_config(model())
        return
    chosen = {"ascend": {"platform": {"model_runner": "v1"}}}
    with pytest.raises(ValueError, match="requested by additional_config, is not part of"):
        engine_config(model(), additional_config=chosen)


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
    done = scripts.run(script, str(model()))
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
    done = scripts.run(script, str(model()), env=environ)
    assert done.returncode == 0, done.stderr
    directory, there = done.stdout.split()[-2:]
    assert (Path(directory).parent, there) == (Path("/tmp"), "True")
    assert not Path(directory).exists()
