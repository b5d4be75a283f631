"""W8A8: int8 weights with per-channel scales, int8 inputs with one static scale and offset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_npu

from ascend_platform import extension
from ascend_platform.quantization.base import Layout, Scheme, Stored, Tensors, transpose_int8


class W8A8(Scheme):
    """Scheme W8A8: x is quantized to q = round(x / input_scale + input_offset), y = (q @ weight + quant_bias) * deq_scale.

    ``quant_bias`` compensates the offset by -input_offset * sum(weight), and in a ModelSlim checkpoint includes the layer's
    bias; ``deq_scale`` is input_scale * weight_scale (msmodelslim, ``AscendV1Saver.on_w8a8_static``).
    """

    name = "W8A8"
    experts = False
    packed: ClassVar[tuple[str, ...]] = ("weight", "deq_scale", "quant_bias", "input_factor", "input_offset")

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        rows = {"quant_bias": Stored(torch.int32, Layout.CHANNELS), "deq_scale": Stored(torch.float32, Layout.CHANNELS)}
        inputs = {name: Stored(torch.float32, Layout.INPUT) for name in ("input_scale", "input_offset")}
        return {"weight": Stored(torch.int8)} | rows | inputs

    def load(self, given: Tensors, dtype: torch.dtype, layer: str, first_rank: bool) -> dict[str, torch.Tensor]:
        bias = given["quant_bias"] if first_rank else torch.zeros_like(given["quant_bias"])
        scale, offset = (shared_input_value(given[name], layer) for name in ("input_scale", "input_offset"))
        return self.pack_static(given["weight"], given["deq_scale"], bias, scale, offset, dtype)

    def pack_static(
        self,
        weight: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor,
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Convert a matrix with static inputs to the tensors of the operators.

        Args:
            weight: int8 ``[out, in]``.
            factor: float32 ``[out]``, the dequantization scale.
            bias: int32 ``[out]``, added to the int32 product.
            scale, offset: float32 ``[1]``, of the inputs.
            dtype: of the outputs.
        """
        factor = factor.float().contiguous()
        if dtype == torch.float16:  # npu_quant_matmul would convert a float32 scale in each call
            factor = torch_npu.npu_trans_quant_param(factor)
        return {
            "weight": transpose_int8(weight),
            "deq_scale": factor,
            "quant_bias": bias.contiguous(),
            "input_factor": 1 / scale,
            "input_offset": offset,
        }

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        values = torch_npu.npu_quantize(x, own["input_factor"], own["input_offset"], torch.qint8, -1, False)
        product = torch_npu.npu_quant_matmul(
            values, own["weight"], own["deq_scale"], bias=own["quant_bias"], output_dtype=x.dtype
        )
        return product if bias is None else product.add_(bias)


def shared_input_value(given: torch.Tensor, layer: str) -> torch.Tensor:
    """The input scale or offset that all matrices of a fused layer share, float32 ``[1]``.

    Raises:
        RefusedError: the values differ.
    """
    if bool((given != given[0]).any()):
        raise extension.RefusedError(
            f"the matrices of {layer} have different input scales or offsets ({', '.join(f'{v:g}' for v in given.tolist())}); "
            "supported: one for all; fix: quantize them together"
        )
    return given[:1].clone()
