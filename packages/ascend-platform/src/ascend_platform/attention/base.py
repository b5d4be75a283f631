"""What attentions of the slots ``attention.*`` have in common, whichever wheel they come from.

Neither class imports torch or vLLM, so that ``ascend_platform.extension``, which siblings take them from, stays light. Each
stands first among the bases, before vLLM's own class (``vllm/v1/attention/backend.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, ClassVar


class AttentionFeature(Enum):
    """What an attention may serve beyond causal attention of a decoder; the value is the text for messages."""

    ALIBI = "ALiBi"
    SLIDING_WINDOW = "sliding window"
    LOGITS_SOFT_CAP = "logits soft cap"
    SINKS = "attention sinks"
    ENCODER = "encoder attention"
    ENCODER_ONLY = "encoder-only attention"
    ENCODER_DECODER = "encoder-decoder attention"

    @classmethod
    def of_attn_type(cls, attn_type: Any) -> AttentionFeature | None:
        """The feature that a vLLM AttentionType, or its value, needs; None for a decoder."""
        name = getattr(attn_type, "value", attn_type)
        return None if name == "decoder" else cls[name.upper()]


class AttentionBackendBase:
    """Put before vLLM's AttentionBackend: its name, its classes, the layout of its cache, and, by what the implementation
    ``serves``, the answers to what vLLM asks.

    Attributes:
        impl_cls, builder_cls: the implementation, which has AttentionImplBase among its bases, and the builder of its metadata.
        block_sizes: tokens of a page that the kernel takes, as vLLM's ``get_supported_kernel_block_sizes`` has them.
        head_sizes: those that heads may have; any without it.
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
        """Types whose feature is in ``serves``, and decoders unless the attention is an encoder's, which has no cache."""
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
        """CUSTOM, a member of AttentionBackendEnum, which Attention.__init__ looks the name up in."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The layout in which the platform takes keys and values apart; see ``ascend_platform/attention/kv_cache.py``."""
        from ascend_platform.attention.kv_cache import LAYOUT

        return (LAYOUT,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


class AttentionImplBase:
    """Put before vLLM's AttentionImpl: its constructor, which refuses what the attention does not say that it serves.

    ``forward`` gets the cache as keys ``[blocks, block_size, kv_heads, head_size]`` and values
    ``[blocks, block_size, kv_heads, head_size_v]``, each contiguous, and metadata None while vLLM profiles memory.

    Attributes:
        title: of the attention, for the line that refuses.
        serves: what the attention serves beyond causal attention of a decoder.
        num_heads, num_kv_heads, head_size: of the query, of the cache, and of one key in elements.
        scale: factor of the scores.
        writes_cache: False where the layer reads another layer's cache.
        alibi_slopes, sliding_window, soft_cap, sinks: as the layer has them, or None; a window counts the token itself.
    """

    title: ClassVar[str] = "this attention"
    serves: ClassVar[frozenset[AttentionFeature]] = frozenset()

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
        """See AttentionImpl for the arguments.

        Raises:
            NotImplementedError: what is asked for is not among ``serves``, or not together with decode context parallelism.
        """
        spread = getattr(self, "dcp_world_size", 1) > 1
        sinks = extra.pop("sinks", None)
        asked = {
            AttentionFeature.ALIBI: alibi_slopes is not None,
            AttentionFeature.SLIDING_WINDOW: sliding_window is not None,
            AttentionFeature.LOGITS_SOFT_CAP: bool(logits_soft_cap),
            AttentionFeature.SINKS: sinks is not None,
        }
        if of_type := AttentionFeature.of_attn_type(attn_type):
            asked[of_type] = True
        needed = [feature for feature, wanted in asked.items() if wanted]
        refused = [feature.value for feature in needed if feature not in self.serves]
        refused += [name for name, value in extra.items() if value is not None]
        if spread and not getattr(self, "supports_dcp", False):
            refused.append("decode context parallelism")
        elif spread and needed:
            refused.append(f"decode context parallelism with {', '.join(feature.value for feature in needed)}")
        if refused:
            has = ", ".join(["causal decoder attention", *sorted(feature.value for feature in self.serves)])
            raise NotImplementedError(f"the model needs {', '.join(refused)}; {self.title} has {has}")
        self.alibi_slopes, self.sliding_window, self.sinks = alibi_slopes, sliding_window, sinks
        self.soft_cap = logits_soft_cap or None
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.writes_cache = kv_sharing_target_layer_name is None


def host_lengths(common: Any, title: str) -> list[int]:
    """Tokens of each request in the cache once the step's are written, from a CommonAttentionMetadata, without a wait.

    ``seq_lens_cpu_upper_bound`` is exact wherever no draft tokens are in flight (CommonAttentionMetadata's own note); with
    speculative decoding the platform sees to it (``config/spec_decode.py``, ``triton_overrides/drafter.py``).

    Raises:
        NotImplementedError: attention that is causal for some requests only, or lengths that the host does not have.
    """
    lengths = common.seq_lens_cpu_upper_bound
    if not isinstance(common.causal, bool) or lengths is None:
        raise NotImplementedError(f"{title} is causal for all requests or for none, with lengths on the host")
    return lengths[: common.num_reqs].tolist()


capturing: AbstractContextManager[Any] | None = None
"""Set by ``ascend_platform.graph.acl_graph`` while it captures: torch_npu's mode in which calls become task groups."""


def graph_task() -> AbstractContextManager[Any]:
    """What to call a kernel in whose lengths are on the host, so that a graph with it gets new lengths for each replay.

    They are the metadata's attribute ``lengths``, a dictionary of the kernel's keyword arguments. The kernel is one that
    torch_npu has a handler for (``torch_npu/npu/_npugraph_handlers``), with ``workspace`` given. Outside a capture nothing
    happens.
    """
    return capturing or nullcontext()


def is_captured() -> bool:
    """Whether a graph is being captured, attention included."""
    return capturing is not None
