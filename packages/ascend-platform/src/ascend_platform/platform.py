# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's platform class for Ascend NPUs."""

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import resolve_current_platform_cls_qualname
from vllm.platforms.interface import Platform, PlatformEnum

from ascend_platform import activation, host
from ascend_platform.attention import selector
from ascend_platform.config import architectures, quantization, resolve, unsupported
from ascend_platform.errors import RefusedError
from ascend_platform.overrides import guard
from ascend_platform.plugins import VARIABLES, slots
from ascend_platform.process import diagnostics
from ascend_platform.process.scopes import enter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

_resolve_again = functools.cache(resolve_current_platform_cls_qualname)


class NPUPlatform(Platform):
    """Ascend NPUs through torch_npu. Other attributes are vLLM's defaults, or those of
    ``torch.npu``."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = host.VISIBLE_NPUS
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012
    dist_backend = "hccl"
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """No-op: vLLM's compiled operators are for CUDA, and those for NPUs are in torch_npu."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Import no implementations: vLLM's IR, which vLLM 0.34 removes, keeps its PyTorch forms;
        see ``ops.register``."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        # vLLM calls this right before it imports the worker's class
        # (vllm/v1/worker/worker_base.py).
        enter("worker")

    # Device

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.npu.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        # vLLM also calls this in the API server, when it replaces an unsupported dtype
        # (vllm/config/model.py).
        return torch.npu.get_device_name(device_id) if torch.npu.is_initialized() else host.chip()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory.

        Raises:
            NotImplementedError: in a process without a device context. vLLM also calls this in the
                API server (``vllm/engine/arg_utils.py:2913``) and uses a default there, which
                leaves the NPU to the worker.
        """
        if not torch.npu.is_initialized():
            raise NotImplementedError(
                "this process has no device context, and reading the memory size would create one"
            )
        return torch.npu.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return torch.npu.memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.npu.get_device_properties(device_id).cube_core_num

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return architectures.dtypes()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        architectures.check_dtype(dtype)

    # Engine features

    @classmethod
    def opaque_attention_op(cls) -> bool:
        # With False, Dynamo would trace the branch of attention without metadata, which is for
        # profiling, into the graph and silently compute wrong tokens.
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        # with torch.npu's graphs, see ascend_platform/graph/acl_graph.py
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

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
        """No-op: ``NPUModelRunner.kv_caches`` is only copied by blocks, regardless of the layers of
        a cache."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        # For a model's configuration; a parser is also created for --help.
        if parser is None:
            quantization.register()
            architectures.register()

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        architectures.check(model_arch)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        quantization.check(quant)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: Any,
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """The qualified name of the attention for a layer.

        Raises:
            RefusedError: no installed attention supports the layer, or another backend is selected
                by name.
        """
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            raise RefusedError(
                f"attention backend {selected_backend.name} is not supported on Ascend NPUs; fix:"
                " remove --attention-backend"
            )
        from vllm.config import get_current_vllm_config

        return selector.select_backend(
            attn_selector_config, get_current_vllm_config().model_config
        )[0]

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> type:
        from ascend_platform.attention.latent import NoPrefillBackend

        return NoPrefillBackend

    @classmethod
    def _align_hybrid_block_size(cls, vllm_config: "VllmConfig", backend_cls: Any) -> None:
        from ascend_platform.state_layers import state_cache

        super()._align_hybrid_block_size(vllm_config, backend_cls)
        state_cache.align_block_size(vllm_config)

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "ascend_platform.lora.punica.NPUPunicaWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return slots.offered("communicator") or super().get_device_communicator_cls()

    # Logging

    @classmethod
    def log_warnings(cls) -> None:
        """Log again which platform plugins vLLM found and activated, and note errors that end the
        process.

        vLLM resolves its platform while its modules are imported, before it configures logging, and
        loses its own log lines about it. It calls this hook right after (``vllm/logger.py``,
        ``configure_logging``).
        """
        diagnostics.watch()
        _resolve_again()

    # Configuration

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Warn of environment variables that neither vLLM nor a component knows."""
        known = {name: functools.partial(os.environ.get, name) for name in VARIABLES}
        guard.add("vllm.envs:environment_variables", known)
        super().validate_environ(hard_fail)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # EngineArgs does so; a VllmConfig can also be created without it.
        resolve.set_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Complete a configuration, refuse it, or prepare this process for it, in this order.

        Raises:
            RefusedError: what is not supported, in one line.
        """
        quantization.detect(vllm_config)
        resolve.update(vllm_config)
        unsupported.check(vllm_config)
        activation.prepare(vllm_config)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: "VllmConfig | None") -> None:
        # The first hook in the engine core after plugins are loaded, in whichever process it runs.
        # There is no configuration where vLLM looks up a spec before an engine has registered them
        # (vllm/v1/kv_cache_spec_registry.py).
        enter("engine")
        if vllm_config is not None:
            activation.activate(vllm_config)
