"""What attentions of slot ``attention.dense`` have in common, whichever wheel they come from.

Neither class imports torch or vLLM, so that ``ascend_platform.extension``, which siblings take them from, stays light. Each
stands first among the bases, before vLLM's own class (``vllm/v1/attention/backend.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar


class DenseBackend:
    """Put before vLLM's AttentionBackend: its name, the layout of its cache, the cache's dtypes."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """CUSTOM, a member of AttentionBackendEnum, which Attention.__init__ looks the name up in."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The layout in which the platform takes keys and values apart; see ``ascend_platform/kv_cache.py``."""
        from ascend_platform.kv_cache import LAYOUT

        return (LAYOUT,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


class DenseImpl:
    """Put before vLLM's AttentionImpl: its constructor, which refuses all but dense causal decoder attention.

    ``forward`` gets the cache as keys ``[blocks, block_size, kv_heads, head_size]`` and values
    ``[blocks, block_size, kv_heads, head_size_v]``, each contiguous, and metadata None while vLLM profiles memory.

    Attributes:
        title: of the attention, for the line that refuses.
        num_heads, num_kv_heads, head_size: of the query, of the cache, and of one key in elements.
        scale: factor of the scores.
        writes_cache: False where the layer reads another layer's cache.
    """

    title: ClassVar[str] = "this attention"

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
            NotImplementedError: ALiBi, sliding window, soft cap, sinks, or other than decoder attention.
        """
        asked = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a logits soft cap": logits_soft_cap,
            f"{attn_type} attention": attn_type != "decoder",
            "decode context parallelism": getattr(self, "dcp_world_size", 1) > 1 and not getattr(self, "supports_dcp", False),
            **{name: value is not None for name, value in extra.items()},
        }
        if refused := [name for name, value in asked.items() if value]:
            raise NotImplementedError(
                f"the model needs {', '.join(refused)}; {self.title} has dense causal decoder attention only"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.writes_cache = kv_sharing_target_layer_name is None


def host_lengths(common: Any, title: str) -> list[int]:
    """Tokens of each request in the cache once the step's are written, from a CommonAttentionMetadata, without a wait.

    ``seq_lens_cpu_upper_bound`` is exact wherever no draft tokens are in flight (CommonAttentionMetadata's own note); with
    speculative decoding the platform sees to it (``speculation.py``, ``drafting.py``).

    Raises:
        NotImplementedError: attention that is not causal, or lengths that the host does not have.
    """
    lengths = common.seq_lens_cpu_upper_bound
    if common.causal is not True or lengths is None:
        raise NotImplementedError(f"{title} is causal, with lengths on the host")
    return lengths[: common.num_reqs].tolist()


capturing: AbstractContextManager[Any] | None = None
"""Set by ``ascend_platform.graphs`` while it captures: torch_npu's mode in which calls become task groups."""


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
