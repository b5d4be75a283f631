"""What torch.compile does to a model's graph: a normalization and the quantization after it become one operator.

Beyond that the pieces between a model's attentions run operator by operator. vLLM's passes run inside Inductor, of which there is
none here; its eager compiler runs none. Importing this module lets the eager compiler run the platform's.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  (its operators)
from torch import fx
from vllm.compilation.compiler_interface import EagerAdaptor
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ascend_platform.vllm_overrides import override

logger = init_logger(__name__)


class PassManager(InductorPass):
    """In place of ``vllm.compilation.passes.pass_manager.PostGradPassManager``, whose passes make CUDA's operators."""

    fuses_norm_quant = False

    def configure(self, config: Any) -> None:
        """Take vLLM's configuration, of whose ``pass_config`` ``fuse_norm_quant`` counts here."""
        self.fuses_norm_quant = config.compilation_config.pass_config.fuse_norm_quant

    def add(self, pass_: InductorPass) -> None:
        """Refuse a pass of ``inductor_compile_config``: there is no Inductor that would run it.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"the pass {type(pass_).__name__} cannot run: Ascend NPUs compile without Inductor; leave it out")

    def __call__(self, graph: fx.Graph) -> None:
        if self.fuses_norm_quant and (count := fuse_norm_quant(graph)):
            logger.debug("%d normalizations quantize their results", count)


class CompilerWithPasses(EagerAdaptor):
    """vLLM's eager compiler, which runs the platform's passes first."""

    def compile(
        self, graph: fx.GraphModule, example_inputs: list[Any], compiler_config: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Any] | None, Any | None]:
        compiler_config[current_platform.pass_key](graph.graph)
        graph.recompile()
        return super().compile(graph, example_inputs, compiler_config, *args, **kwargs)


override("vllm.compilation.compiler_interface:EagerAdaptor", CompilerWithPasses)


def fuse_norm_quant(graph: fx.Graph) -> int:
    """Make of each npu_add_rms_norm, whose result goes to an npu_dynamic_quant and nowhere else, one operator.

    npu_add_rms_norm_dynamic_quant (Atlas A2 and A3, as quantized layers) does not round the normalized values to the inputs'
    dtype before it quantizes them. None for a fixed scale takes what such layers have: npu_add_rms_norm_quant wants a
    scale and an int32 offset for each channel (``torch_npu/_op_plugin_docs.py``).

    Returns:
        How many.
    """
    ops, count = torch.ops.npu, 0
    for norm in graph.find_nodes(op="call_function", target=ops.npu_add_rms_norm):
        parts = {user.args[1]: user for user in norm.users}
        shaped = _only_user(parts.get(0))
        quantized = _only_user(shaped)
        if (
            not set(parts) <= {0, 2}
            or shaped is None
            or quantized is None
            or (shaped.op, shaped.target) != ("call_method", "reshape")
            or quantized.target != ops.npu_dynamic_quant
            or quantized.args != (shaped,)
            or quantized.kwargs
        ):
            continue
        x, residual, weight, epsilon = norm.args
        with graph.inserting_before(norm):
            options = {"epsilon": epsilon, "output_mask": [True, False]}
            fused = graph.call_function(ops.npu_add_rms_norm_dynamic_quant, (x, residual, weight), options)
            values, total, scale = (graph.call_function(operator.getitem, (fused, index)) for index in (0, 2, 3))
            values = graph.call_method("reshape", (values, *shaped.args[1:]))
            scale = graph.call_method("reshape", (scale, -1))
        for place, new in ((0, values), (1, scale)):
            for user in [user for user in quantized.users if user.args[1] == place]:
                user.replace_all_uses_with(new)
        if 2 in parts:
            parts[2].replace_all_uses_with(total)
        for old in (*quantized.users, quantized, shaped, *parts.values(), norm):
            graph.erase_node(old)
        count += 1
    return count


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
