# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interface of the platform for other wheels: registration, slots, options, versions, the chip,
bases for attention backends, and the installation for diagnostics.

It is the one module that other wheels may import. A wheel's ``register()`` calls :func:`join`; its
set-up function calls :func:`offer`. Importing this module imports neither torch nor vLLM, because
vLLM calls ``register()`` in every process, in no particular order and possibly twice
(``vllm/plugins/__init__.py``).

The names in ``__all__`` are the interface, of version :data:`API_VERSION`.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_platform import installation
from ascend_platform.attention.base import (
    AttentionBackendBase,
    AttentionFeature,
    AttentionImplBase,
    GatedDeltaInputs,
    LatentAttentionImplBase,
    SparseLatentAttentionImplBase,
    cache_parts,
    graph_task,
    is_captured,
)
from ascend_platform.attention.length_bounds import (
    deferred_host_lengths,
    draft_length_bounds,
    host_lengths,
)
from ascend_platform.chips import FAMILIES as CHIP_FAMILIES
from ascend_platform.chips import Chip, chip
from ascend_platform.errors import RefusedError, did_you_mean
from ascend_platform.fingerprint import drift, fingerprint, module_source, tree_version
from ascend_platform.host import chip_family
from ascend_platform.logger import logger
from ascend_platform.ops.formats import is_nz, to_nz
from ascend_platform.options import Range, config, option, platform_options, rope_order
from ascend_platform.options import parse as parse_options
from ascend_platform.overrides import guard, table
from ascend_platform.overrides.table import Override, optional_rows
from ascend_platform.plugins import requirements
from ascend_platform.plugins.plugin_filter import allowed
from ascend_platform.plugins.registry import API_VERSION, join, state, with_state
from ascend_platform.plugins.requirements import version
from ascend_platform.plugins.slots import offer, offered
from ascend_platform.process.replacements import listen as listen_for_replacements
from ascend_platform.process.replacements import listeners as replacement_listeners
from ascend_platform.protocols import Diagnostics, Experts

if TYPE_CHECKING:
    from ascend_platform.attention.mla_prolog import is_used as uses_mla_prolog
    from ascend_platform.ops.activation import LEAST_QUANTIZED
    from ascend_platform.ops.layernorm import BiasedNorm
    from ascend_platform.ops.moe.experts import NPUExperts, NPUFusedMoEMethod
    from ascend_platform.ops.moe.grouped import group_list_type, grouped_matmul, with_adapters
    from ascend_platform.ops.norm_quant import quantized_rows
    from ascend_platform.ops.norm_quant import takes_rows as takes_int8_rows
    from ascend_platform.state_layers.kernels.packed import decode as decode_states
    from ascend_platform.state_layers.kernels.packed import slabs as state_slabs
    from ascend_platform.state_layers.kernels.packed import unit_lower_inverse

__all__ = [
    "API_VERSION",
    "CHIP_FAMILIES",
    "LEAST_QUANTIZED",
    "AttentionBackendBase",
    "AttentionFeature",
    "AttentionImplBase",
    "BiasedNorm",
    "Chip",
    "Diagnostics",
    "Experts",
    "GatedDeltaInputs",
    "LatentAttentionImplBase",
    "NPUExperts",
    "NPUFusedMoEMethod",
    "Override",
    "Range",
    "RefusedError",
    "SparseLatentAttentionImplBase",
    "allowed",
    "cache_parts",
    "check_overrides",
    "chip",
    "chip_family",
    "config",
    "decode_states",
    "deferred_host_lengths",
    "did_you_mean",
    "draft_length_bounds",
    "drift",
    "fingerprint",
    "graph_task",
    "group_list_type",
    "grouped_matmul",
    "host_lengths",
    "install_overrides",
    "installation",
    "int8_rows",
    "is_captured",
    "is_nz",
    "join",
    "listen_for_replacements",
    "logger",
    "module_source",
    "offer",
    "offered",
    "option",
    "optional_rows",
    "overrides",
    "parse_options",
    "platform_options",
    "quantized_rows",
    "replacement_listeners",
    "rope_order",
    "state",
    "state_slabs",
    "takes_int8_rows",
    "to_nz",
    "torch_on_npu",
    "tree_version",
    "unit_lower_inverse",
    "unmet",
    "uses_mla_prolog",
    "version",
    "with_adapters",
    "with_state",
]

_RENAMED = {"DenseBackend": "AttentionBackendBase", "DenseImpl": "AttentionImplBase"}
"""Deprecated names of this interface, and what they are called now."""


_LAZY = {
    "LEAST_QUANTIZED": "ops.activation:LEAST_QUANTIZED",
    "BiasedNorm": "ops.layernorm:BiasedNorm",
    "NPUExperts": "ops.moe.experts:NPUExperts",
    "NPUFusedMoEMethod": "ops.moe.experts:NPUFusedMoEMethod",
    "decode_states": "state_layers.kernels.packed:decode",
    "group_list_type": "ops.moe.grouped:group_list_type",
    "grouped_matmul": "ops.moe.grouped:grouped_matmul",
    "quantized_rows": "ops.norm_quant:quantized_rows",
    "state_slabs": "state_layers.kernels.packed:slabs",
    "takes_int8_rows": "ops.norm_quant:takes_rows",
    "unit_lower_inverse": "state_layers.kernels.packed:unit_lower_inverse",
    "uses_mla_prolog": "attention.mla_prolog:is_used",
    "with_adapters": "ops.moe.grouped:with_adapters",
}
"""Names of this interface whose modules import torch or vLLM, and are imported when they are read."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].partition(":")
        return getattr(importlib.import_module(f"ascend_platform.{module}"), attribute)
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is deprecated; use {_RENAMED[name]}", DeprecationWarning, stacklevel=2
    )
    return globals()[_RENAMED[name]]


def unmet(distribution: str) -> str:
    """The first declared requirement of an installed wheel that is not met, with the command that
    fixes it; "" if all are met."""
    return str(requirements.unmet(distribution) or "")


def int8_rows(x: Any) -> tuple[Any, Any]:
    """Rows ``[tokens, in]`` in int8 and their scales, float32 ``[tokens]``: those of the norm that
    computed x, if it was fused with the quantization."""
    import torch_npu

    from ascend_platform.ops import norm_quant

    return norm_quant.quantized_rows(x) or torch_npu.npu_dynamic_quant(x)


def torch_on_npu() -> Any:
    """``torch`` with the streams and events of torch.npu instead of torch.cuda, for a module of vLLM
    that uses these."""
    from ascend_platform.worker import torch_npu_view

    return torch_npu_view.torch_on_npu


def overrides(tree: Path | None = None) -> list[dict[str, str]]:
    """The names of vLLM that the wheels override, compared with a vLLM.

    Args:
        tree: a checkout or a site-packages that contains vLLM, for which those of vLLM's V2 model
            runner, and the launches of its kernels, are compared too where that runner is
            supported; the installed one without.

    Returns:
        For each its ``name``, ``target``, ``action``, ``vllm`` (the versions whose source is
        known), ``why``, ``remove_when``, ``problem`` and its ``fix``, both "" where vLLM's source
        is as supported.
    """
    found = (tree and tree_version(tree)) or version("vllm")
    names = ["common", "v1", *table.of_wheels()]
    if tree is not None and found:
        names.append("v2")
    rows = [each for each in table.rows(*names) if not each.optional and each.is_for(found)]
    return [each.row(tree) for each in rows]


def check_overrides(name: str, *modules: str) -> None:
    """Compare rows of a wheel's ``overrides.toml`` with the installed vLLM, which is not imported.

    Args:
        name: of the wheel's entry point in the group ``vllm_ascend.overrides``.
        modules: of the replacements, below the wheel's package; all rows without.

    Raises:
        RefusedError: a target is missing or has changed, in one line.
    """
    guard.check_rows(table.of_modules(name, *modules))


def install_overrides(name: str, *modules: str) -> None:
    """Apply rows of a wheel's ``overrides.toml`` in this process; a second call does nothing. The
    arguments are those of :func:`check_overrides`.

    Raises:
        RefusedError: a target is missing or has changed, or a module that the row does not name has
            imported it.
    """
    guard.install(name, *modules)
