# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Base classes of the attention backends of the slots ``attention.*``, in all wheels.

This module imports neither torch nor vLLM, because ``ascend_platform.extension`` exports it. The
base classes are mixins: list them before vLLM's own class (``vllm/v1/attention/backend.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from ascend_platform.errors import RefusedError


class AttentionFeature(Enum):
    """Optional features of an attention implementation, beyond causal decoder attention. The values
    are texts for messages."""

    ALIBI = "ALiBi"
    SLIDING_WINDOW = "sliding window"
    LOGITS_SOFT_CAP = "logits soft cap"
    SINKS = "attention sinks"
    ENCODER = "encoder attention"
    ENCODER_ONLY = "encoder-only attention"
    ENCODER_DECODER = "encoder-decoder attention"

    @classmethod
    def of_attn_type(cls, attn_type: Any) -> AttentionFeature | None:
        """The feature required by a vLLM ``AttentionType`` or its value; None for decoders."""
        name = getattr(attn_type, "value", attn_type)
        return None if name == "decoder" else cls[name.upper()]


class AttentionBackendBase:
    """Mixin for vLLM's ``AttentionBackend``: name, classes, KV cache layout and capability queries.

    The queries about sliding windows, sinks and attention types are answered from ``serves`` of the
    implementation.

    Attributes:
        impl_cls: the implementation, a subclass of AttentionImplBase.
        builder_cls: the metadata builder.
        block_sizes: supported block sizes in tokens, as returned by vLLM's
            ``get_supported_kernel_block_sizes``.
        head_sizes: supported head sizes in elements; empty means any.
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]
    impl_cls: ClassVar[type[Any]]
    builder_cls: ClassVar[type[Any]]
    block_sizes: ClassVar[list[Any]]
    head_sizes: ClassVar[Sequence[int]] = ()

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.builder_cls

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        return cls.block_sizes

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [*cls.head_sizes]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether ``serves`` has the type's feature. Encoder-only attention has no KV cache and
        does not serve decoders."""
        serves, feature = cls.get_impl_cls().serves, AttentionFeature.of_attn_type(attn_type)
        return AttentionFeature.ENCODER_ONLY not in serves if feature is None else feature in serves

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return AttentionFeature.SLIDING_WINDOW in cls.get_impl_cls().serves

    @classmethod
    def supports_sink(cls) -> bool:
        return AttentionFeature.SINKS in cls.get_impl_cls().serves

    @staticmethod
    def get_name() -> str:
        """CUSTOM: ``Attention.__init__`` looks the name up in AttentionBackendEnum, whose members
        are fixed."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The layout from which keys and values are split
        (``ascend_platform/attention/kv_cache.py``)."""
        from ascend_platform.attention.kv_cache import LAYOUT

        return (LAYOUT,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


_UNUSED = {"chunk_lookback": -1}
"""Values of arguments of vLLM's layers that request nothing, other than None."""


class AttentionImplBase:
    """Mixin for vLLM's ``AttentionImpl``: a constructor that raises for features that are not in
    ``serves``, and ``forward`` by the methods :meth:`write` and :meth:`attend` of a subclass.

    The KV cache is a pair of contiguous tensors, keys ``[blocks, block_size, kv_heads, head_size]``
    and values ``[blocks, block_size, kv_heads, head_size_v]``.

    Attributes:
        title: name of the attention in error messages.
        serves: features beyond causal decoder attention.
        operators: those of torch_npu that not every chip has.
        borrows_part: whether :meth:`bind` takes memory of the size of the keys for a moment.
        num_heads: heads of the query on this rank.
        num_kv_heads: heads of the KV cache on this rank.
        head_size: elements of one key.
        scale: factor of the scores.
        writes_cache: False for layers that share another layer's KV cache.
        alibi_slopes: slopes of the layer's ALiBi biases, or None.
        sliding_window: tokens that a token sees, itself included, or None.
        soft_cap: limit of the scores by tanh, or None.
        sinks: the layer's attention sinks, or None.
    """

    title: ClassVar[str] = "this attention"
    serves: ClassVar[frozenset[AttentionFeature]] = frozenset()
    operators: ClassVar[tuple[str, ...]] = ()
    borrows_part: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        """Take the arguments of vLLM's ``AttentionImpl``.

        Raises:
            RefusedError: a feature is not in ``serves``, or not supported with decode
                context parallelism.
        """
        uses_dcp = getattr(self, "dcp_world_size", 1) > 1
        sinks = extra.pop("sinks", None)
        # Passed to backends whose supports_alibi_sqrt says that they support it.
        self.alibi_sqrt = bool(extra.pop("use_alibi_sqrt", False))
        requested = {
            AttentionFeature.ALIBI: alibi_slopes is not None,
            AttentionFeature.SLIDING_WINDOW: sliding_window is not None,
            AttentionFeature.LOGITS_SOFT_CAP: bool(logits_soft_cap),
            AttentionFeature.SINKS: sinks is not None,
        }
        if of_type := AttentionFeature.of_attn_type(attn_type):
            requested[of_type] = True
        needed = [feature for feature, is_requested in requested.items() if is_requested]
        refused = [feature.value for feature in needed if feature not in self.serves]
        refused += [name for name, value in extra.items() if value != _UNUSED.get(name)]
        if uses_dcp and not getattr(self, "supports_dcp", False):
            refused.append("decode context parallelism")
        elif uses_dcp and needed:
            features = ", ".join(feature.value for feature in needed)
            refused.append(f"decode context parallelism with {features}")
        if refused:
            others = sorted(feature.value for feature in self.serves)
            supported = ", ".join(["causal decoder attention", *others])
            needs = f"the model needs {', '.join(refused)}"
            raise RefusedError(
                f"{needs}; {self.title} supports {supported}; fix: serve another model"
            )
        self.alibi_slopes, self.sliding_window, self.sinks = alibi_slopes, sliding_window, sinks
        self.soft_cap = logits_soft_cap or None
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.writes_cache = kv_sharing_target_layer_name is None

    def bind(self, kv_cache: Any) -> None:
        """Prepare for the layer's KV cache, which ``forward`` receives; called when it is
        allocated."""

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Write a step's new keys and values into the KV cache and compute attention.

        Args:
            layer: vLLM's layer.
            query: ``[tokens, heads, head_size]``.
            key: ``[tokens, kv_heads, head_size]``; in cross attention the encoder's new tokens, or
                None.
            value: ``[tokens, kv_heads, head_size_v]``, or None, like the key.
            kv_cache: as :meth:`bind` got it.
            attn_metadata: what the backend's builder has made; None during vLLM's memory profiling
                run, when there is no KV cache: the output is then zero.
            output: ``[tokens, heads, head_size_v]``, written.

        Returns:
            ``output``.
        """
        if attn_metadata is None:
            self.reserve(layer, query)
            return output.zero_()
        if self.writes_cache and key is not None and value is not None:
            self.write(layer, key, value, kv_cache, attn_metadata)
        self.attend(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def reserve(self, layer: Any, query: Any) -> None:
        """Allocate in vLLM's memory profiling run what a step takes beyond its output; vLLM subtracts
        it from the KV cache."""

    def write(self, layer: Any, key: Any, value: Any, kv_cache: Any, meta: Any) -> None:
        """Write a step's new keys and values, as in :meth:`forward`, into the KV cache; attention
        without a KV cache has nothing to write."""

    def attend(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, meta: Any, output: Any
    ) -> None:
        """Write the attention of a step's tokens to the output, with arguments of :meth:`forward`;
        the KV cache has the new keys and values already.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def gather_new(self, *new: Any) -> tuple[Any, ...]:
        """Gather a step's new keys and values ``[tokens, ...]`` from the ranks of prefill context
        parallelism, one rank's tokens after the other, in the order of ``slot_mapping``.

        All ranks have the same number of tokens, including padding. Without prefill context
        parallelism ``new`` is returned.
        """
        if getattr(self, "pcp_world_size", 1) == 1:
            return new
        import torch
        from vllm.distributed.parallel_state import get_pcp_group

        # One collective for keys and values.
        rows = [each.flatten(1) for each in new]
        gathered = get_pcp_group().all_gather(torch.cat(rows, -1), dim=0)
        parts = gathered.split([each.shape[1] for each in rows], -1)
        return tuple(
            part.reshape(-1, *each.shape[1:]) for part, each in zip(parts, new, strict=True)
        )


class LatentAttentionImplBase(AttentionImplBase):
    """Mixin for vLLM's ``MLAAttentionImpl``: multi-head latent attention, by ``forward_mqa`` for
    all tokens.

    The query comes projected to the latents ("absorbed"), so that all heads share one key, a latent
    and its rotated part, and one value, the latent. The KV cache is a pair of contiguous tensors,
    ``latent`` ``[blocks, block_size, 1, kv_lora_rank]`` and ``rope`` ``[blocks, block_size, 1,
    qk_rope_head_dim]``.

    Attributes:
        kv_lora_rank: elements of a latent.
        qk_rope_head_dim: elements of the rotated part.
        qk_nope_head_dim: elements of a head of the expanded keys, besides the rotated part.
        v_head_dim: elements of a head of the values.
        kv_b_proj: the layer that expands latents to keys and values.
    """

    def __init__(
        self,
        *args: Any,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        q_lora_rank: int | None = None,
        qk_head_dim: int | None = None,
        **extra: Any,
    ) -> None:
        """Take the arguments of vLLM's ``MLAAttentionImpl``; see :class:`AttentionImplBase`."""
        super().__init__(*args, **extra)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self.kv_b_proj = kv_b_proj

    @staticmethod
    def valid_slots(slot_mapping: Any) -> Any:
        """Slots to write to. In a run without metadata vLLM gives -1 for all tokens: they go to the
        null block.

        vLLM writes the KV cache of latent attention in such runs, too, and captures piecewise
        graphs of them.
        """
        from vllm.forward_context import get_forward_context

        is_without = get_forward_context().attn_metadata is None
        return slot_mapping.clamp_min(0) if is_without else slot_mapping


class SparseLatentAttentionImplBase(LatentAttentionImplBase):
    """Mixin for vLLM's ``MLAAttentionImpl``: latent attention of each token to the tokens that an
    indexer has selected (DSA).

    The indexer's keys are a KV cache layer with the same backend and metadata, ``[blocks,
    block_size, 1, index_head_dim]``. Beyond ``forward_mqa`` an implementation has two methods::

        write_index(key, index_cache, attn_metadata)
        select(query, weights, index_cache, attn_metadata, selected)

    ``index_cache`` is a ``QuantizedIndex`` of int8 keys only where ``takes_int8_index`` is True,
    and the layer's KV cache a ``QuantizedLatent`` only where ``takes_int8_latents`` is.
    ``write_index`` stores keys ``[tokens, index_head_dim]``. ``select`` writes to ``selected``,
    int32 ``[tokens, index_topk]``, the positions of the visible keys with the largest sums over
    heads of ``weights * relu(query @ key)``, and -1 beyond; query is ``[tokens, heads,
    index_head_dim]`` and weights ``[tokens, heads]``.

    Attributes:
        indexer: of the layer, or None if it uses the selection of an earlier layer.
        topk_indices_buffer: int32 ``[tokens, index_topk]``, the selection, shared by layers.
    """

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        *args: Any,
        indexer: Any = None,
        topk_indices_buffer: Any = None,
        index_group_builder: Any = None,
        **extra: Any,
    ) -> None:
        """Take the arguments of vLLM's sparse ``MLAAttentionImpl``; see
        :class:`LatentAttentionImplBase`."""
        super().__init__(*args, **extra)
        self.indexer, self._topk_indices_buffer = indexer, topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> Any:
        """The buffer of the indexer, if there is one: vLLM lets the indexers of a drafter share
        the buffer of the target after construction."""
        if self.indexer is None:
            return self._topk_indices_buffer
        return self.indexer.topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """No-op: only for vLLM's cache of selected tokens on the host (HiSparse)."""


@dataclass(frozen=True)
class GatedDeltaInputs:
    """Inputs of a gated delta rule for each token, one request after the other.

    Attributes:
        q: ``[tokens, key heads, keys]``, normalized.
        k: ``[tokens, key heads, keys]``, normalized.
        v: ``[tokens, heads, values]``.
        g: logarithms of the decays, ``[tokens, heads]``.
        beta: strengths, ``[tokens, heads]``.
        scale: of the queries.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    scale: float


capturing: ContextVar[AbstractContextManager[Any] | None] = ContextVar("capturing", default=None)
"""torch_npu's graph dispatch mode while ``ascend_platform.graph.acl_graph`` captures: kernel calls
in it become task groups."""


def graph_task(
    arguments: Callable[[], dict[str, Any] | None] | None = None,
) -> AbstractContextManager[Any]:
    """Context manager for a kernel call whose host arguments are updated at each graph replay.

    The kernel needs a handler in torch_npu (``torch_npu/npu/_npugraph_handlers``) and a workspace
    for the longest sequences. A no-op outside of graph capture.

    Args:
        arguments: called before each replay for the kernel's keyword arguments; None from it means
            that the graph cannot compute the input, and nothing is replayed
            (``ascend_platform.graph.acl_graph.NotReplayedError``). Without, they are the attribute
            ``lengths`` of the attention metadata.
    """
    mode = capturing.get()
    if mode is None:
        return nullcontext()
    return mode if arguments is None else _task(mode, arguments)


@contextmanager
def _task(mode: Any, arguments: Callable[[], dict[str, Any] | None]) -> Iterator[None]:
    tasks = mode.graph_dispatch_records
    first = len(tasks)
    with mode:
        yield
    if len(tasks) == first:
        raise RefusedError(
            "torch_npu captured an attention whose sequence lengths it cannot update: it does so with"
            " CANN 9.1 or later; fix: install CANN 9.1, or leave out cudagraph_mm_encoder"
        )
    for task in tasks[first:]:
        task.arguments = arguments


def is_captured() -> bool:
    """Whether a graph that contains attention is being captured."""
    return capturing.get() is not None


def cache_parts(kv_cache: Any) -> dict[str, Any]:
    """The tensors of one layer's KV cache, by name: ``key`` and ``value``, ``latent`` and ``rope``,
    ``packed``, or ``index``.

    Each is contiguous, ``[blocks, block_size, kv_heads, width]`` in the cache's dtype: block ``b``
    is the run of ``stride(0)`` elements at ``data_ptr() + b * stride(0) * element_size()``.
    ``kv_cache`` is what an attention's ``forward`` and a connector's ``register_kv_caches`` get for
    a layer.

    Raises:
        TypeError: something else.
    """
    if not hasattr(kv_cache, "_asdict"):
        expected = (
            "a layer's KV cache is expected, as ascend_platform.attention.kv_cache.KVCachePair"
        )
        raise TypeError(f"{expected}, not {type(kv_cache).__name__}")
    return kv_cache._asdict()
