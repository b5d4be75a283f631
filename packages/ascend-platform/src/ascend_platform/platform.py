"""The NPU as vLLM sees it: the platform class, which answers what vLLM asks and refuses what this version cannot serve."""

import atexit
import dataclasses
import functools
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm import envs
from vllm.platforms import resolve_current_platform_cls_qualname
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import extension, host, quantization
from ascend_platform.config import kv_connectors, spec_decode
from ascend_platform.observability import metrics
from ascend_platform.worker import watchdog

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = extension.logger

BUILT_IN_ATTENTION = "ascend_platform.attention.paged.PagedAttentionBackend"
BUILT_IN_ENCODER = "ascend_platform.attention.encoder.EncoderAttentionBackend"


def _pin(variable: str, value: str, why: str) -> None:
    if (given := os.environ.get(variable)) not in (None, value):
        logger.warning("%s=%s is not supported on Ascend NPUs and becomes %s: %s", variable, given, value, why)
    os.environ[variable] = value


# This module is imported in every process as vLLM resolves its platform, which is before vLLM reads these.
_pin("VLLM_USE_V2_MODEL_RUNNER", "0", "this version runs vLLM's V1 model runner, which needs no Triton")
_pin("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a device context does not survive a fork")
watchdog.end_with_parent()
# vLLM warns of names it does not know (Platform.validate_environ)
for _variable in extension.VARIABLES:
    envs.environment_variables.setdefault(_variable, functools.partial(os.environ.get, _variable))


class NPUPlatform(Platform):
    """Ascend NPUs through torch_npu. What is not here is vLLM's default, or ``torch.npu``'s by the same name."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012
    dist_backend = "hccl"
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own compiled operators are CUDA's; the NPU's come with torch_npu."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        import ascend_platform.ops.rotary_embedding  # noqa: F401

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> Any:
        from vllm.config.kernel import IrOpPriorityConfig

        fused = ["npu", "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=fused, fused_add_rms_norm=fused)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        extension.enter("worker")  # vLLM calls this right before it imports the worker's class (vllm/v1/worker/worker_base.py)

        from ascend_platform.triton_overrides import slot_mapping

        slot_mapping.register(slot_mapping.OVERRIDES)

    # The device

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.npu.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.npu.get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory.

        Raises:
            NotImplementedError: in a process that has not opened a device. vLLM asks in the API server too
                (``vllm/engine/arg_utils.py:2913``), takes a default there, and so leaves the NPU to the worker.
        """
        if not torch.npu.is_initialized():
            raise NotImplementedError("asking for the memory would open the NPU in a process that does not use it")
        return torch.npu.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return torch.npu.memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.npu.get_device_properties(device_id).cube_core_num

    # What the engine may use

    @classmethod
    def opaque_attention_op(cls) -> bool:
        # False lets Dynamo bake the metadata-less profiling branch of attention into the graph: wrong tokens, silently.
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"  # on torch.npu's graphs: ascend_platform/graph/acl_graph.py

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "ascend_platform.graph.fusion_passes.PassManager"

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """``NPUModelRunner.kv_caches`` is only copied from block by block, whichever layer a cache belongs to."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        if parser is None:  # a model is about to be configured; the parser of options is made for --help, too
            quantization.register()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        if quant not in quantization.METHODS:
            raise extension.RefusedError(
                f"{_serves()} weights quantized by {' or '.join(quantization.METHODS)}; the model asks for {quant!r}"
            )

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: "AttentionSelectorConfig", num_heads: int | None = None
    ) -> str:
        """The qualified name of the attention for a layer.

        Raises:
            RefusedError: the layer needs what no installed attention has, or another backend was asked for by name.
        """
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            raise extension.RefusedError(
                f"attention backend {selected_backend.name} is not for Ascend NPUs; leave --attention-backend out"
            )
        from vllm.config import get_current_vllm_config

        return attention_for(attn_selector_config, get_current_vllm_config().model_config)[0]

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "ascend_platform.ops.punica.NPUPunicaWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return extension.offered("communicator") or super().get_device_communicator_cls()

    # What people read

    @classmethod
    @functools.cache
    def log_warnings(cls) -> None:
        """Let vLLM say again which platform plugins it found and activated.

        It resolves its platform while its modules are imported, before its logging is configured, and its own lines
        of that are lost. This hook comes right after (``vllm/logger.py``, ``configure_logging``).
        """
        resolve_current_platform_cls_qualname()

    # The configuration

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode
        from vllm.config.vllm import OptimizationLevel

        kv_connectors.resolve(vllm_config)
        vllm_config.kernel_config.enable_jit_warmup = False
        compilation, model = vllm_config.compilation_config, vllm_config.model_config
        if compilation.cudagraph_mode is None and vllm_config.optimization_level == OptimizationLevel.O2:
            pooling = model is not None and model.pooler_config is not None
            compilation.cudagraph_mode = CUDAGraphMode.NONE if pooling else CUDAGraphMode.FULL_DECODE_ONLY
        mode = compilation.cudagraph_mode
        if compilation.mode is None and mode is not None and not mode.requires_piecewise_compilation():
            compilation.mode = CompilationMode.NONE  # without Inductor, compiling is only for taking a model to pieces
        if compilation.compile_sizes is None:
            compilation.compile_sizes = []
        for field in dataclasses.fields(compilation.pass_config):
            if getattr(compilation.pass_config, field.name) is None:  # vLLM's other fusions make CUDA's operators
                setattr(compilation.pass_config, field.name, field.name == "fuse_norm_quant")

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Name the worker and refuse what this version cannot serve.

        Raises:
            RefusedError: everything asked for that is not supported, in one line.
        """
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "ascend_platform.worker.worker.NPUWorker"
        quantization.detect(vllm_config)
        if refused := [what for what, asked in _later_features(vllm_config).items() if asked]:
            raise extension.RefusedError(f"{_serves()} models without {', '.join(refused)}; these come later")
        kv_connectors.check(vllm_config)
        spec_decode.check(vllm_config)
        _check_load_format(vllm_config.load_config, vllm_config.quant_config is not None)
        _check_devices(parallel)
        _check_graphs(vllm_config)
        if parallel.distributed_executor_backend != "external_launcher":
            _own_sockets()
        if "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
            _prepare_for_ray(parallel)
        if parallel.numa_bind and parallel.numa_bind_nodes is None:
            _find_numa_nodes(parallel)
        if (
            vllm_config.model_config
            and vllm_config.model_config.is_moe
            and parallel.use_all2all
            and not extension.offered("communicator")
        ):
            raise extension.RefusedError(
                "experts of several data-parallel engines need ascend-communicator, which is "
                f"{extension.state('ascend-communicator')}; install it, and let VLLM_PLUGINS name ascend_communicator"
            )
        metrics.offer(vllm_config)
        announce(vllm_config)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: "VllmConfig") -> None:
        # the first platform hook in the engine core after the plugins are loaded, wherever the engine core runs
        extension.enter("engine")
        announce(vllm_config)


def _own_sockets() -> None:
    """Give vLLM's Unix sockets a directory that goes with this process: what processes that die have left goes with it."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        directory = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-")  # which child processes inherit
        atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(directory, ignore_errors=True)


def _prepare_for_ray(parallel: "ParallelConfig") -> None:
    """Leave to each node its own visible NPUs and address, and let each worker's shared memory end with the worker.

    vLLM hands the driver's variables on to workers that do not have them (``vllm/v1/executor/ray_executor_v2.py``). It ends
    workers by ``ray.kill``, which by default kills their children too: Python's resource tracker, which would remove the memory.
    """
    from vllm.v1.executor import ray_utils

    ray_utils.WORKER_SPECIFIC_ENV_VARS.update([NPUPlatform.device_control_env_var, "HCCL_IF_IP"])
    given: dict[str, Any] = dict(parallel.ray_runtime_env or {})
    variables = {"RAY_kill_child_processes_on_worker_exit": "0"} | given.get("env_vars", {})
    parallel.ray_runtime_env = cast(Any, given | {"env_vars": variables})


def announce(vllm_config: "VllmConfig") -> None:
    """Take the configuration of the components and log the summary line, once per process.

    Called where each process first has the configuration with all plugins loaded: ``check_and_update_config`` in the
    API server, ``register_custom_kv_cache_specs`` in the engine core, ``NPUWorker`` in a worker.
    """
    extension.join("ascend-platform", "ascend", api=extension.API_VERSION)
    extension.configure(vllm_config.additional_config)
    if vllm_config.model_config is not None:
        _log_once(extension.summary(_attention_of(vllm_config)))


@functools.cache
def _log_once(line: str) -> None:
    logger.info(line)


def attention_for(config: "AttentionSelectorConfig", model: Any) -> tuple[str, str]:
    """The attention for a layer: its qualified name, and which it is and why, for people.

    The one offered for the layer's kind if it takes the layer, else the built-in one.

    Raises:
        RefusedError: neither takes the layer.
    """
    kind = "encoder" if config.attn_type == "encoder_only" else "sinks" if config.has_sink else "dense"
    built_in = BUILT_IN_ENCODER if kind == "encoder" else BUILT_IN_ATTENTION
    reason = f"ascend-attention is {extension.state('ascend-attention')}"
    if path := extension.offered(f"attention.{kind}"):
        obstacles = _obstacles(path, config, model)
        if not obstacles:
            return path, f"fused (ascend-attention {extension.version('ascend-attention')})"
        reason = f"the fused one does not take this model: {', '.join(obstacles)}"
    if obstacles := _obstacles(built_in, config, model):
        raise extension.RefusedError(f"{_serves()} dense attention; the model needs another: {', '.join(obstacles)}")
    return built_in, f"built-in PyTorch ({reason})"


def _obstacles(path: str, config: "AttentionSelectorConfig", model: Any) -> list[str]:
    backend = resolve_obj_by_qualname(path)
    # vLLM tells the layer of these, and its selector nothing
    asked = {
        "ALiBi": model is not None and model.uses_alibi,
        "a logits soft cap": model is not None and bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
    }
    serves = getattr(backend.get_impl_cls(), "serves", ())
    found = [f"{name} not supported" for name, wanted in asked.items() if wanted and name not in serves]
    return backend.validate_configuration(device_capability=None, **config._asdict()) + found


def _attention_of(vllm_config: "VllmConfig") -> str:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache = vllm_config.model_config, vllm_config.cache_config
    block_size = cache.block_size if cache.user_specified_block_size else None
    try:
        dtype = cast(torch.dtype, model.dtype)  # resolved by now
        config = AttentionSelectorConfig(model.get_head_size(), dtype, cache.cache_dtype, block_size)
        if model.attn_type == "encoder_only":
            config = config._replace(attn_type="encoder_only")
        return attention_for(config, model)[1]
    except extension.RefusedError as error:
        return f"none ({error})"


def _check_load_format(load_config: Any, is_quantized: bool = False) -> None:
    """Have the options of a sibling's load format looked at here, where they can be refused in one line.

    Raises:
        RefusedError: the options, a load format whose wheel is not there, or a sharded state of quantized weights.
    """
    if is_quantized and load_config.load_format in ("sharded_state", "runai_streamer_sharded"):
        raise extension.RefusedError(
            f"--load-format {load_config.load_format} is served with weights that are not quantized: a sharded state is saved "
            "after they are processed for the NPU, and would be processed again; load the checkpoint, or take weights from a peer"
        )
    if check := extension.offered(f"load_options.{load_config.load_format}"):
        resolve_obj_by_qualname(check)(load_config.model_loader_extra_config)
    elif load_config.load_format in ("ascend_peer", "netloader"):
        raise extension.RefusedError(
            f"--load-format {load_config.load_format} is ascend-model-loader's, which is "
            f"{extension.state('ascend-model-loader')}; install it, and let VLLM_PLUGINS name ascend_model_loader"
        )


def _check_devices(parallel: "ParallelConfig") -> None:
    """Refuse a layout that needs more NPUs than this machine shows, where vLLM starts all workers on this machine.

    Raises:
        RefusedError: how many are needed and how many are there, in one line.
    """
    if parallel.distributed_executor_backend not in (None, "mp", "uni") or parallel.nnodes > 1:
        return
    if parallel.data_parallel_backend == "ray" or "platform" not in extension.scopes_here():
        return  # an engine's own process has its part of the devices, and the main process has looked at all
    needed = parallel.world_size * parallel.data_parallel_size_local
    given = parallel.assigned_physical_gpu_ids
    found = torch.npu.device_count() if given is None else len(given)  # counted without opening one
    if needed > found:
        raise extension.RefusedError(
            f"the layout needs {needed} NPUs (tensor {parallel.tensor_parallel_size} x pipeline {parallel.pipeline_parallel_size}"
            f" x data {parallel.data_parallel_size_local}) and {found} can be used; lower --tensor-parallel-size, "
            f"--pipeline-parallel-size or --data-parallel-size-local, or widen {NPUPlatform.device_control_env_var}"
        )


def _check_graphs(vllm_config: "VllmConfig") -> None:
    """Refuse graphs with attention of prefills in them where the attention cannot be in a graph.

    Raises:
        RefusedError: which modes there are, in one line.
    """
    from vllm.config import CUDAGraphMode

    if vllm_config.model_config is None or vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL:
        return
    if (attention := _attention_of(vllm_config)).startswith("built-in"):
        raise extension.RefusedError(
            f"cudagraph_mode FULL needs attention that a graph can hold, and this model's is {attention}; "
            "PIECEWISE and NONE remain"
        )


def _find_numa_nodes(parallel: "ParallelConfig") -> None:
    """For --numa-bind: the NUMA node of each NPU, which vLLM asks of CUDA's platform alone; no binding where it is not known."""
    nodes, obstacle = host.numa_nodes()
    if not obstacle and not shutil.which("numactl"):
        obstacle = "the program numactl is not installed"
    if obstacle:
        parallel.numa_bind = False
        logger.warning("--numa-bind is off: %s; --numa-bind-nodes takes the nodes of the NPUs, one after another", obstacle)
    else:
        parallel.numa_bind_nodes = nodes
        logger.info("--numa-bind: the NPUs are next to the NUMA nodes %s", ", ".join(map(str, nodes)))


def _serves(verb: str = "serves") -> str:
    return f"ascend-platform {extension.version('ascend-platform')} {verb}"


def _later_features(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What comes in later versions, and whether it is asked for."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    offload, passes = vllm_config.offload_config, vllm_config.compilation_config.pass_config
    features = {
        "encoder-cache connectors": vllm_config.ec_transfer_config,
        "weight offloading": offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "elastic expert parallelism": parallel.enable_elastic_ep,
        "fault tolerance by instruction (--enable-fault-tolerance)": parallel.enable_fault_tolerance,
        "dual batch overlap": parallel.use_ubatching,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "vLLM's second model runner, which watermarking needs": vllm_config.use_v2_model_runner,
        "fusions by torch.compile other than fuse_norm_quant": any(
            getattr(passes, field.name) is True
            and field.name.startswith(("fuse_", "enable_"))
            and field.name != "fuse_norm_quant"
            for field in dataclasses.fields(passes)
        ),
    }
    if model is not None:
        targets = vllm_config.lora_config and vllm_config.lora_config.target_modules
        features |= {
            "LoRA on experts (--lora-target-modules without experts serves the other layers)": vllm_config.lora_config
            and model.is_moe
            and (targets is None or any(target.rpartition(".")[2] == "experts" for target in targets)),
            f"a KV cache of {cache.cache_dtype}": cache.cache_dtype not in ("auto", str(model.dtype).split(".")[-1]),
            "MLA": model.use_mla,
            f"experts placed {parallel.expert_placement_strategy}": parallel.expert_placement_strategy != "linear",
            "state-space layers": model.is_hybrid or model.is_attention_free,
        }
    return features
