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

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from ascend_platform.chips import Chip, chip
from ascend_platform.errors import RefusedError, did_you_mean
from ascend_platform.fingerprint import drift, fingerprint, module_source, tree_version
from ascend_platform.logger import logger
from ascend_platform.ops.formats import to_nz
from ascend_platform.options import Range, config, option, rope_order
from ascend_platform.options import parse as parse_options
from ascend_platform.overrides import guard, table
from ascend_platform.overrides.table import Override, optional_rows
from ascend_platform.plugins import requirements
from ascend_platform.plugins.plugin_filter import allowed
from ascend_platform.plugins.registry import API_VERSION, join, state
from ascend_platform.plugins.requirements import version
from ascend_platform.plugins.slots import offer, offered
from ascend_platform.process.replacements import listen as listen_for_replacements
from ascend_platform.process.replacements import listeners as replacement_listeners
from ascend_platform.protocols import Diagnostics, Experts

__all__ = [
    "API_VERSION",
    "AttentionBackendBase",
    "AttentionFeature",
    "AttentionImplBase",
    "Chip",
    "Diagnostics",
    "Experts",
    "GatedDeltaInputs",
    "LatentAttentionImplBase",
    "Override",
    "Range",
    "RefusedError",
    "SparseLatentAttentionImplBase",
    "allowed",
    "cache_parts",
    "check_overrides",
    "chip",
    "config",
    "decode_states",
    "deferred_host_lengths",
    "did_you_mean",
    "draft_length_bounds",
    "drift",
    "fingerprint",
    "graph_task",
    "host_lengths",
    "install_overrides",
    "installation",
    "int8_rows",
    "is_captured",
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
    from ascend_platform.attention import mla_prolog

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


def state_slabs(query_start_loc: Any, tokens: int) -> Iterator[Any]:
    """Chunks of 64 tokens of packed sequences, 16 of them at a time, for the prefill of a layer with
    states.

    Args:
        query_start_loc: ``[requests + 1]``, the first token of each request.
        tokens: of all requests.

    Yields:
        An object with ``heads(x)``, which turns rows ``[tokens, heads, size]`` into
        ``[chunks, heads, 64, size]`` in float32, 0 where there is no token; ``write(output, rows)``,
        which does the opposite for ``[tokens + 1, heads, size]``; and ``scan``, which computes the
        chunks of a delta rule one after the other
        (``ascend_platform/state_layers/kernels/packed.py``).
    """
    from ascend_platform.state_layers.kernels import packed

    return packed.slabs(query_start_loc, tokens)


def decode_states(
    states: Any,
    read: Any,
    write: Any,
    query_start_loc: Any,
    num_accepted_tokens: Any,
    output: Any,
    step: Callable[[Any, Any], tuple[Any, Any]],
) -> None:
    """Compute the token of each request, or its token and draft tokens, of a layer with states.

    Args:
        states: ``[blocks, ...]``, written; block 0 is no request's and keeps what it has.
        read: ``[requests]``, or ``[requests, steps]`` with a block for the state after each token.
        write: as ``read``.
        query_start_loc: ``[requests + 1]``; None for a token each.
        num_accepted_tokens: ``[requests]``, which of the blocks has the state to begin with, from
            1; or None.
        output: ``[tokens, ...]``, written; rows of no request are undefined.
        step: takes states ``[requests, ...]`` in float32 and the requests' tokens, and returns the
            new states and the output.
    """
    from ascend_platform.state_layers.kernels import packed

    packed.decode(states, read, write, query_start_loc, num_accepted_tokens, output, step)


def torch_on_npu() -> Any:
    """``torch`` with the streams and events of torch.npu instead of torch.cuda, for a module of vLLM
    that uses these."""
    from ascend_platform.worker import torch_npu_view

    return torch_npu_view.torch_on_npu


def unit_lower_inverse(strict: Any) -> Any:
    """The inverse of 1 + the part of a matrix below its diagonal, ``[..., n, n]``, n a power of 2,
    without an operator of its own and without powers of the matrix, which would cancel."""
    from ascend_platform.state_layers.kernels import packed

    return packed.unit_lower_inverse(strict)


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
