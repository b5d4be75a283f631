# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interface of the platform for other wheels: registration, slots, options, versions, the chip,
bases for attention backends.

It is the one module that other wheels may import. A wheel's ``register()`` calls :func:`join`; its
set-up function calls :func:`offer`. Importing this module imports neither torch nor vLLM, because
vLLM calls ``register()`` in every process, in no particular order and possibly twice
(``vllm/plugins/__init__.py``).

The names in ``__all__`` are the interface, of version :data:`API_VERSION`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ascend_platform.attention.base import (
    AttentionBackendBase,
    AttentionFeature,
    AttentionImplBase,
    GatedDeltaInputs,
    LatentAttentionImplBase,
    SparseLatentAttentionImplBase,
    cache_parts,
    deferred_host_lengths,
    draft_length_bounds,
    graph_task,
    host_lengths,
    is_captured,
)
from ascend_platform.chips import Chip, chip
from ascend_platform.config.options import Range, config, option, rope_order
from ascend_platform.config.options import parse as parse_options
from ascend_platform.errors import RefusedError, did_you_mean
from ascend_platform.fingerprint import drift, fingerprint, module_source, tree_version
from ascend_platform.logger import logger
from ascend_platform.ops.formats import to_nz
from ascend_platform.plugins import requirements
from ascend_platform.plugins.plugin_filter import allowed
from ascend_platform.plugins.registry import API_VERSION, join, state
from ascend_platform.plugins.requirements import version
from ascend_platform.plugins.slots import offer, offered
from ascend_platform.protocols import Experts

__all__ = [
    "API_VERSION",
    "AttentionBackendBase",
    "AttentionFeature",
    "AttentionImplBase",
    "Chip",
    "Experts",
    "GatedDeltaInputs",
    "LatentAttentionImplBase",
    "Range",
    "RefusedError",
    "SparseLatentAttentionImplBase",
    "allowed",
    "cache_parts",
    "chip",
    "config",
    "deferred_host_lengths",
    "did_you_mean",
    "draft_length_bounds",
    "drift",
    "fingerprint",
    "graph_task",
    "host_lengths",
    "int8_rows",
    "is_captured",
    "join",
    "logger",
    "module_source",
    "offer",
    "offered",
    "option",
    "overrides",
    "parse_options",
    "rope_order",
    "state",
    "takes_int8_rows",
    "to_nz",
    "tree_version",
    "unmet",
    "uses_mla_prolog",
    "version",
]

_RENAMED = {"DenseBackend": "AttentionBackendBase", "DenseImpl": "AttentionImplBase"}
"""Deprecated names of this interface, and what they are called now."""


def __getattr__(name: str) -> Any:
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


def uses_mla_prolog(vllm_config: Any) -> bool:
    """Whether layers with latent attention compute what precedes the attention of a decode by
    npu_mla_prolog_v3."""
    from ascend_platform.config import mla_prolog

    return mla_prolog.is_used(vllm_config)


def takes_int8_rows(layer: Any) -> bool:
    """Whether a linear layer multiplies int8 rows with a scale each by int8 weights: ``weight``
    ``[in, out]``, ``weight_scale`` float32 ``[out]``."""
    from ascend_platform.ops import norm_quant

    return norm_quant.takes_rows(layer)


def int8_rows(x: Any) -> tuple[Any, Any]:
    """Rows ``[tokens, in]`` in int8 and their scales, float32 ``[tokens]``: those of the norm that
    computed x, if it was fused with the quantization."""
    import torch_npu

    from ascend_platform.ops import norm_quant

    return norm_quant.rows_of(x) or torch_npu.npu_dynamic_quant(x)


def overrides(tree: Path | None = None) -> list[dict[str, str]]:
    """The names of vLLM that ascend-platform overrides, compared with a vLLM.

    Args:
        tree: a checkout or a site-packages that contains vLLM, for which those of vLLM's V2 model
            runner, and the launches of its kernels, are compared too where that runner is
            supported; the installed one without.

    Returns:
        For each its ``name``, ``target``, ``action``, ``vllm`` (the versions whose source is
        known), ``why``, ``remove_when``, ``problem`` and its ``fix``, both "" where vLLM's source
        is as supported.
    """
    from ascend_platform.overrides import table

    rows = [each.row(tree) for each in table.rows("common", "v1")]
    if tree is not None:
        rows += table.v2_rows(tree, tree_version(tree) or version("vllm"))
    return rows
