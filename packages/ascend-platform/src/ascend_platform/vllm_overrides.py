# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of vLLM that ascend-platform replaces or adds to: a table, and guards that compare vLLM's
source with it.

vLLM has no registry, platform hook or base class for these. :func:`check` compares all of them
where an engine is configured; :func:`override`, :func:`add` and :func:`require` compare a single
one again where it is applied, so that nothing is replaced in a vLLM that is not supported. The
table is also the source of docs/patches-ledger.md and of ``vllm-ascend patches``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ascend_platform import fingerprint
from ascend_platform.errors import RefusedError, did_you_mean
from ascend_platform.logger import logger
from ascend_platform.plugins import requirements

ACCEPT = "VLLM_ASCEND_ACCEPT_OVERRIDES"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
"""vLLM's deprecated module, in which nothing is replaced where a vLLM does not have it any more."""


@dataclass(frozen=True)
class Override:
    """One name of vLLM.

    Attributes:
        target: ``package.module:qualified.name`` of the definition, or of the module's own
        ``torch``.
        action: what is done to it: ``replaced``, ``entries added``, ``kernel registered``,
        ``operator defined`` or ``used``.
        why: what fails on the NPU without it.
        remove_when: the condition under which the entry can be deleted.
        sources: fingerprints of the source that it was written for, by the first minor version of
        vLLM that has that source.
        compared: the target whose source is compared, where it is not ``target`` itself.
        replaced_in: the modules whose name is replaced, if it is not only the defining module.
        kept_in: modules, or packages, that import the name with ``from … import`` and keep vLLM's
        own.
    """

    target: str
    action: str
    why: str
    remove_when: str
    sources: Mapping[str, str]
    compared: str = ""
    replaced_in: tuple[str, ...] = ()
    kept_in: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.qualname}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    def row(self, tree: Path | None = None) -> dict[str, str]:
        """A row of the table of overrides; see ``extension.overrides``."""
        fields = {
            "name": self.name,
            "target": self.target,
            "action": self.action,
            "vllm": ", ".join(self.sources),
        }
        return fields | {
            "why": self.why,
            "remove_when": self.remove_when,
            "problem": self.problem(tree),
        }

    def problem(self, tree: Path | None = None) -> str:
        """The difference between a vLLM (of a source tree, or the installed one) and the supported
        ones; "" if there is none."""
        module, _, qualname = self.target.partition(":")
        source = fingerprint.module_source(module, tree)
        compared = self.compared or self.target
        found = source is not None and (
            compared.endswith(".*") or fingerprint.fingerprint(source, qualname)
        )
        if not found:
            return fingerprint.drift(self.target, (), source)
        source = fingerprint.module_source(compared.partition(":")[0], tree)
        return fingerprint.drift(compared, self.sources.values(), source)


def include(entries: Iterable[Override]) -> None:
    """Add the names that only some engines replace. They are compared by :func:`check` with these
    entries, and when applied."""
    _included.extend(each for each in entries if each not in _included)


@functools.cache
def has_v1_runner() -> bool:
    """Whether the installed vLLM still has its V1 model runner."""
    return fingerprint.module_source(V1_RUNNER) is not None


def _is_removed(module: str) -> bool:
    return module == V1_RUNNER and not has_v1_runner()


def check(entries: Iterable[Override] | None = None) -> None:
    """Compare all targets, or those of `entries`, with the source that this version supports.

    Raises:
        RefusedError: a target is missing or has changed, in one line.
    """
    names = {each.name for each in (*OVERRIDES, *_included)}
    for name in sorted(_accepted() - names):
        near = did_you_mean(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        logger.warning("%s names %r, which is no override%s", ACCEPT, name, hint)
    present = [
        each for each in (OVERRIDES if entries is None else entries) if not _is_removed(each.module)
    ]
    different = [each for each in present if _problem(each.target)]
    refused = [each for each in different if not _accept(each)]
    fingerprint.parsed.cache_clear()
    if refused:
        more = (
            f" (and {len(refused) - 1} more, see vllm-ascend patches check)" if refused[1:] else ""
        )
        raise _error(refused[0], f"{_problem(refused[0].target)}{more}")


def override(target: str, replacement: Any) -> None:
    """Replace a name of vLLM in this process; a second call for a target does nothing.

    A module that has imported the original with ``from … import`` would keep it. vLLM's modules
    that have done so must be in the entry's ``replaced_in`` or ``kept_in``.

    Raises:
        RefusedError: the target is missing or has changed, or a module that the entry does not name
        has imported it.
    """
    each = _entry(target)
    if target in _applied or _is_removed(each.module):
        return
    original = _resolve(each)
    report_foreign(target, original)
    if "." in each.qualname:
        owner = functools.reduce(
            getattr, each.qualname.split(".")[:-1], importlib.import_module(each.module)
        )
        setattr(owner, each.qualname.rpartition(".")[2], replacement)
    else:
        named = each.replaced_in or (each.module,)
        own = [name for name in named if not _is_removed(name)]
        if not isinstance(original, ModuleType):
            _check_importers(each, original, {each.module, *own})
        for name in own:
            # A module that is imported later imports the replacement.
            if name in sys.modules or each.module not in named:
                setattr(importlib.import_module(name), each.qualname, replacement)
    _applied.add(target)


def add(target: str, entries: Mapping[Any, Any] | Iterable[Any]) -> None:
    """Add entries to a dict, or attributes to a class, where it does not have the key, or members
    to a set of vLLM's.

    Raises:
        RefusedError: the target is missing, or its source or that of its user has changed.
    """
    table = _resolve(_entry(target))
    if isinstance(entries, Mapping):
        for key, value in entries.items():
            if not isinstance(table, type):
                table.setdefault(key, value)
            elif not hasattr(table, key):
                setattr(table, key, value)
    else:
        table.update(entries)


@contextlib.contextmanager
def without(target: str, members: Iterable[Any]) -> Iterator[None]:
    """Take members out of a set of vLLM's while the context lasts.

    Raises:
        RefusedError: the target is missing, or its source or that of its user has changed.
    """
    table, members = _resolve(_entry(target)), set(members)
    table.difference_update(members)
    try:
        yield
    finally:
        table.update(members)


def require(target: str) -> None:
    """Compare a target that is used, or replaced through a registry of vLLM's, with the supported
    source.

    Raises:
        RefusedError: the target is missing or has changed.
    """
    if _problem(target) and not _accept(_entry(target)):
        raise _error(_entry(target), _problem(target))
    fingerprint.parsed.cache_clear()


_applied: set[str] = set()
_included: list[Override] = []


def _entry(target: str) -> Override:
    return next(each for each in (*OVERRIDES, *_included) if each.target == target)


def _accepted() -> set[str]:
    return set(filter(None, map(str.strip, os.environ.get(ACCEPT, "").split(","))))


@functools.cache
def _problem(target: str) -> str:
    return _entry(target).problem()


def _accept(each: Override) -> bool:
    """Whether the user accepts the difference; a missing target cannot be accepted."""
    problem = _problem(each.target)
    if each.name not in _accepted() or "is missing" in problem:
        return False
    logger.warning("override %s applied despite a mismatch (%s): %s", each.name, ACCEPT, problem)
    return True


def _error(each: Override, problem: str) -> RefusedError:
    accept = ""
    if "is missing" not in problem:
        names = ",".join(sorted({*_accepted(), each.name}))
        accept = f", or, if this vLLM is edited and the override fits it: export {ACCEPT}={names}"
    return RefusedError(
        f"vLLM {requirements.version('vllm')} is not supported by ascend-platform"
        f" {requirements.version('ascend-platform')}: override {each.name}: {problem};"
        " fix: pip install --upgrade ascend-platform, or install an unedited release of"
        f" {_supported()}{accept}"
    )


def _supported() -> str:
    return str(requirements.required_by_platform("vllm"))


def _resolve(each: Override) -> Any:
    require(each.target)
    try:
        return functools.reduce(
            getattr, each.qualname.split("."), importlib.import_module(each.module)
        )
    except (ImportError, AttributeError) as error:
        raise _error(each, f"target {each.target} is missing: {error}") from error


def _check_importers(each: Override, original: Any, known: set[str]) -> None:
    for name, module in list(sys.modules.items()):
        if (
            not name.startswith("vllm.")
            or name in known
            or any(f"{name}.".startswith(f"{kept}.") for kept in each.kept_in)
        ):
            continue
        if (
            any(value is original for value in list(vars(module).values()))
            and each.name not in _accepted()
        ):
            raise _error(each, f"{name} has imported {each.target} too, and would keep vLLM's own")


def report_foreign(target: str, original: Any) -> None:
    """Log which other plugin has replaced vLLM's own object, if one has."""
    name = (
        getattr(original, "__globals__", {}).get("__name__")
        or getattr(original, "__module__", None)
        or ""
    )
    if isinstance(name, str) and name.partition(".")[0] not in (
        *sys.stdlib_module_names,
        "vllm",
        "torch",
        "",
    ):
        logger.warning(
            "override %s replaces the object that %s has installed for %s",
            _entry(target).name,
            name,
            target,
        )


_ROUTER = "vllm.model_executor.layers.fused_moe.router."
_HOOK = "vLLM has a platform hook for it"


def torch_view(module: str, why: str, fingerprint: str, since: str = "0.31") -> Override:
    """A module whose ``torch.cuda`` becomes ``torch.npu``, without a change to ``torch`` itself."""
    remove_when = "the module uses torch.accelerator instead of torch.cuda"
    return Override(
        f"{module}:torch",
        "replaced",
        why,
        remove_when,
        {since: fingerprint},
        compared=f"{module}:torch.cuda.*",
    )


def kernel(module: str, qualname: str, why: str, **sources: str) -> Override:
    """A Triton kernel with a PyTorch implementation that takes its arguments, through vLLM's
    registry of kernels."""
    by_minor = {
        minor.replace("v", "").replace("_", "."): source for minor, source in sources.items()
    }
    return Override(
        f"{module}:{qualname}", "kernel registered", why, "Triton runs on the NPU", by_minor
    )


OVERRIDES: tuple[Override, ...] = (
    torch_view(
        "vllm.v1.worker.gpu_model_runner",
        "the V1 runner makes streams and events by torch.cuda",
        "5a9f55bd7b2c",
    ),
    torch_view(
        "vllm.distributed.parallel_state",
        "graph_capture and the groups take torch.cuda's streams",
        "7420a0e96b51",
    ),
    torch_view(
        "vllm.v1.spec_decode.ngram_proposer_gpu",
        "it copies the number of draft tokens on a torch.cuda stream",
        "0285abb6afad",
    ),
    torch_view(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper captures by torch.cuda.graph",
        "934f7fb345ba",
    ),
    Override(
        "vllm.distributed.parallel_state:graph_capture",
        "replaced",
        "it prepares the communicators of CUDA and XPU; HCCL's collectives are captured without",
        _HOOK,
        {"0.31": "91b3eceb44f5", "0.33": "4312d0671379"},
        replaced_in=(
            "vllm.distributed.parallel_state",
            "vllm.distributed",
            V1_RUNNER,
            "vllm.v1.worker.gpu.cudagraph_utils",
        ),
        kept_in=("vllm.v1.worker.gpu", "vllm.benchmarks"),
    ),
    Override(
        "vllm.distributed.eplb.eplb_state:EplbState",
        "replaced",
        "it sets the device of the thread that moves experts' weights only on CUDA and XPU",
        "EplbState sets device_index for every device",
        {"0.31": "54ba80813d3b"},
        compared="vllm.distributed.eplb.eplb_state:EplbState.__init__",
        replaced_in=("vllm.v1.worker.gpu_model_runner",),
        # These use its static methods, or its name in annotations.
        kept_in=(
            "vllm.model_executor.layers.fused_moe.routed_experts",
            "vllm.v1.spec_decode",
            "vllm.v1.worker.gpu",
        ),
    ),
    Override(
        "vllm.v1.attention.backends.mla.prefill.selector:get_mla_prefill_backend",
        "replaced",
        "0.31's own choice needs vLLM's FlashAttention; nothing is replaced from 0.32 on, which"
        " asks the platform",
        "vLLM 0.31 is no longer supported",
        {"0.31": "6f85060308a7", "0.32": "9fb90850b67e"},
        replaced_in=("vllm.model_executor.layers.attention.mla_attention",),
        kept_in=("vllm.v1.attention.backends.mla", "vllm.models"),
    ),
    Override(
        "vllm.utils.torch_utils:weak_ref_tensor",
        "replaced",
        "it calls an operator of vLLM's CUDA extension",
        _HOOK,
        {"0.31": "8af0c074cd0c"},
        replaced_in=("vllm.utils.torch_utils", "vllm.compilation.breakable_cudagraph"),
    ),
    Override(
        "vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances",
        "used",
        "vLLM clears, and moves to another memory pool, the graphs of all engines of the process",
        "vLLM's profile_cudagraph_memory clears only the graphs of its runner",
        {"0.31": "a9c2e5f493e3"},
        compared="vllm.compilation.cuda_graph:CUDAGraphWrapper.__init__",
    ),
    Override(
        "vllm.compilation.compiler_interface:EagerAdaptor",
        "replaced",
        "vLLM's eager compiler runs no passes, and there is no Inductor",
        "the eager compiler runs the platform's pass manager",
        {"0.31": "92739aeba699"},
        compared="vllm.compilation.compiler_interface:EagerAdaptor.compile",
        replaced_in=("vllm.compilation.backends",),
    ),
    Override(
        "vllm.lora.utils:_all_lora_classes",
        "replaced",
        "vLLM's LoRA on experts needs a modular kernel of Triton",
        "vLLM lets a platform register classes of LoRA layers",
        {"0.31": "b9854c4e7282"},
        compared="vllm.lora.layers.fused_moe:FusedMoEWithLoRA.__init__",
    ),
    Override(
        "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
        "replaced",
        "torch.compile fuses its thirteen operators only on CUDA, and the layer has no hook",
        "the layer asks the platform for it",
        {"0.31": "6b69b33dab0e"},
    ),
    Override(
        "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts",
        "replaced",
        "it uses a second stream only on CUDA",
        "aux_stream and the class's order ask the platform",
        {"0.31": "ae6b09963e9e", "0.33": "9c08c18729cd"},
        replaced_in=("vllm.model_executor.layers.fused_moe.runner.moe_runner",),
        kept_in=("vllm.model_executor", "vllm.models", "vllm.lora"),  # in annotations
    ),
    Override(
        "vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.forward",
        "replaced",
        "with TP, DP and EP all TP ranks but rank 0 compute padding in a step of one token",
        "vLLM tracks whether hidden states are sharded, as in its pull request 50691",
        {"0.31": "67623f49e863"},
    ),
    Override(
        f"{_ROUTER}grouped_topk_router:grouped_topk",
        "replaced",
        "npu_moe_gating_top_k does it in one operator, and the router has no hook",
        "the router asks the platform for it",
        {"0.31": "84e56a4c3d15"},
    ),
    Override(
        f"{_ROUTER}base_router:eplb_map_to_physical_and_record",
        "replaced",
        "for other devices than CUDA, ROCm and XPU vLLM returns the logical ids unmapped, and"
        " counts nothing",
        "vLLM's fallback maps the ids",
        {"0.31": "b0dacc84bbf9"},
        replaced_in=(
            f"{_ROUTER}base_router",
            "vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe",
            "vllm.models.deepseek_v4.nvidia.model",
            "vllm.models.kimi_k3.nvidia.model",
        ),
    ),
    Override(
        f"{_ROUTER}zero_expert_router:ZeroExpertRouter._compute_routing",
        "replaced",
        "it launches a Triton kernel that is not in vLLM's registry of kernels, and tensor[mask] ="
        " 0 waits for the device",
        "vLLM computes the share of experts without weights in PyTorch",
        {"0.31": "6fb87209ee4a"},
    ),
    *(
        Override(
            f"{_ROUTER}{module}:vllm_topk_{scores}",
            "replaced",
            f"it calls torch.ops._moe_C.topk_{scores} of vLLM's CUDA extension; the NPU's operators"
            " return new tensors",
            "the router asks the platform for it",
            {"0.31": fingerprinted},
        )
        for module, scores, fingerprinted in (
            ("fused_topk_router", "softmax", "ab8a6e501fc2"),
            ("fused_topk_router", "sigmoid", "344ea2f4a103"),
            ("fused_topk_bias_router", "softmax", "c674f96edd00"),
            ("fused_topk_bias_router", "sigmoid", "75fcefd3c2e7"),
        )
    ),
    Override(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "replaced",
        "npu_top_k_top_p_sample does it in one operator, and the rejection sampler has no hook",
        "the rejection sampler uses the sampler's own method",
        {"0.31": "a1916ce18e6c", "0.33": "1d6c2688bdca"},
        replaced_in=("vllm.v1.sample.rejection_sampler",),
        kept_in=(
            "vllm.v1.sample.ops.topk_topp_sampler",
            "vllm.v1.worker.gpu",
            "vllm.v1.watermarking",
            "vllm.model_executor.models.diffusion_gemma",
        ),
    ),
    Override(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
        "replaced",
        "rejected tokens change seq_lens only on the device, and have slot -1, which"
        " npu_scatter_pa_kv_cache rejects",
        "drafters keep exact sequence lengths on the host and use slots of the null block",
        {"0.31": "1a23a12d0de6", "0.32": "c117a57e4063"},
    ),
    Override(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._get_slot_mapping",
        "replaced",
        "padding tokens of a drafter have slot -1, which npu_scatter_pa_kv_cache rejects",
        "drafters use slots of the null block",
        {"0.31": "f9cd94f47416"},
    ),
    Override(
        "vllm.v1.spec_decode.utils:extend_all_queries_by_N",
        "replaced",
        "it extends seq_lens only on the device",
        "it extends seq_lens_cpu_upper_bound",
        {"0.31": "a4edf38c9dc1"},
        replaced_in=("vllm.v1.spec_decode.llm_base_proposer",),
    ),
    *(
        Override(
            f"vllm.profiler.wrapper:{table}",
            "entries added",
            "vLLM looks up by device type what its profiler can record",
            _HOOK,
            {"0.31": "7858fd04a880"},
            compared="vllm.profiler.wrapper:validate_worker_profiler_config",
        )
        for table in (
            "_SUPPORTED_PROFILER_KINDS",
            "_DEFAULT_TORCH_PROFILER_ACTIVITIES",
            "_SUPPORTED_TORCH_PROFILER_ACTIVITIES",
        )
    ),
    Override(
        "vllm.model_executor.layers.rotary_embedding:_ROPE_DICT",
        "used",
        "engines of a process share the rotary tables of equal models, and sleep mode frees those"
        " of its engine",
        "vLLM keeps the tables per engine",
        {"0.31": "24362a6e9494"},
    ),
    Override(
        "vllm.v1.executor.ray_utils:WORKER_SPECIFIC_ENV_VARS",
        "entries added",
        "Ray workers on other nodes must not get the driver's visible NPUs and address, nor Ray's"
        " state the secrets",
        "vLLM takes the platform's device_control_env_var for it",
        {"0.31": "c65f283590fa"},
    ),
    Override(
        "vllm.envs:environment_variables",
        "entries added",
        "vLLM warns of environment variables that it does not know",
        "vLLM lets plugins register environment variables",
        {"0.31": "bd04f7d404be"},
        compared="vllm.platforms.interface:Platform.validate_environ",
    ),
    kernel(
        "vllm.v1.worker.block_table",
        "ComputeSlotMappingKernel.kernel",
        "the slot of each token in the KV cache",
        v0_31="258a232bfdb8",
        v0_32="5ebee7d19b24",
    ),
    *(
        kernel("vllm.v1.sample.rejection_sampler", qualname, why, v0_31=source)
        for qualname, why, source in (
            (
                "expand_kernel",
                "a request's sampling parameter for each of its draft tokens",
                "c78260607249",
            ),
            (
                "rejection_greedy_sample_kernel",
                "accepted draft tokens at temperature 0",
                "8954f37cd20f",
            ),
            ("rejection_random_sample_kernel", "accepted draft tokens", "82b20c180407"),
            (
                "sample_recovered_tokens_kernel",
                "the token that replaces the first rejected one",
                "4ec2a810d3d8",
            ),
        )
    ),
    *(
        kernel("vllm.v1.spec_decode.utils", qualname, why, v0_31=source)
        for qualname, why, source in (
            (
                "eagle_step_slot_mapping_metadata_kernel",
                "positions and slots of the drafter's next step",
                "15bfc6d06e03",
            ),
            (
                "eagle_prepare_inputs_padded_kernel",
                "the drafter's inputs after rejection",
                "25a6038779a9",
            ),
            (
                "eagle_prepare_next_token_padded_kernel",
                "the last accepted token of each request",
                "dcb94ba9102c",
            ),
            (
                "copy_and_expand_eagle_inputs_kernel",
                "the inputs of parallel drafting",
                "bc6ff465c28d",
            ),
        )
    ),
)
