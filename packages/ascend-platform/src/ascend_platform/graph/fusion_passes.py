# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""FX passes for torch.compile: fusion of RMSNorm and dynamic quantization into one operator.

vLLM runs its passes inside Inductor, which has no NPU backend, and its eager compiler runs none.
Here the eager compiler runs the platform's passes. Apart from them the pieces between attention
layers run operator by operator.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401
from torch import fx
from vllm.compilation.compiler_interface import EagerAdaptor
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ascend_platform.errors import RefusedError

logger = init_logger(__name__)


class PassManager(InductorPass):
    """Pass manager that replaces vLLM's PostGradPassManager, whose passes insert CUDA operators."""

    fuses_norm_quant = False

    def configure(self, config: Any) -> None:
        """Read ``pass_config.fuse_norm_quant`` of vLLM's configuration; other passes do not exist
        here."""
        self.fuses_norm_quant = config.compilation_config.pass_config.fuse_norm_quant

    def add(self, pass_: InductorPass) -> None:
        """Refuse a custom pass of ``inductor_compile_config``.

        Raises:
            ValueError: always, because NPUs compile without Inductor.
        """
        raise RefusedError(
            f"pass {type(pass_).__name__} is not supported: Ascend NPUs compile without Inductor;"
            " fix: remove the pass"
        )

    def __call__(self, graph: fx.Graph) -> None:
        if self.fuses_norm_quant and (count := fuse_norm_quant(graph)):
            logger.debug("fused %d RMSNorms with dynamic quantization", count)


class CompilerWithPasses(EagerAdaptor):
    """vLLM's eager compiler with the platform's passes."""

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Callable[..., Any] | None, Any | None]:
        compiler_config[current_platform.pass_key](graph.graph)
        graph.recompile()
        return super().compile(graph, example_inputs, compiler_config, *args, **kwargs)


def fuse_norm_quant(graph: fx.Graph) -> int:
    """Fuse each npu_add_rms_norm whose normalized output is used by one npu_dynamic_quant only.

    npu_add_rms_norm_dynamic_quant (Atlas A2 and A3, as quantized layers) does not round the
    normalized values to the input dtype before it quantizes them. Static quantization is not fused:
    npu_add_rms_norm_quant needs a scale and an int32 offset per channel
    (``torch_npu/_op_plugin_docs.py``), which such layers do not have.

    Returns:
        Number of fused pairs.
    """
    ops, count = torch.ops.npu, 0
    for norm in graph.find_nodes(op="call_function", target=ops.npu_add_rms_norm):
        outputs = {user.args[1]: user for user in norm.users}
        reshaped = _single_user(outputs.get(0))
        quantized = _single_user(reshaped)
        if not set(outputs) <= {0, 2} or reshaped is None or quantized is None:
            continue
        is_reshape = (reshaped.op, reshaped.target) == ("call_method", "reshape")
        call = (quantized.target, quantized.args, quantized.kwargs)
        if not is_reshape or call != (ops.npu_dynamic_quant, (reshaped,), {}):
            continue
        x, residual, weight, epsilon = norm.args
        with graph.inserting_before(norm):
            options = {"epsilon": epsilon, "output_mask": [True, False]}
            operands = (x, residual, weight)
            fused = graph.call_function(ops.npu_add_rms_norm_dynamic_quant, operands, options)
            values, total, scale = (
                graph.call_function(operator.getitem, (fused, index)) for index in (0, 2, 3)
            )
            values = graph.call_method("reshape", (values, *reshaped.args[1:]))
            scale = graph.call_method("reshape", (scale, -1))
        for index, new in ((0, values), (1, scale)):
            for user in [user for user in quantized.users if user.args[1] == index]:
                user.replace_all_uses_with(new)
        if 2 in outputs:
            outputs[2].replace_all_uses_with(total)
        for old in (*quantized.users, quantized, reshaped, *outputs.values(), norm):
            graph.erase_node(old)
        count += 1
    return count


def _single_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
