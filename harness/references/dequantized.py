# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized models in transformers with dequantized weights, right or wrong in one way."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compare import layouts
from harness.models import quantize
from harness.models.quantize import Matrix


@dataclass
class Model:
    """A quantized model, and what transformers need to compute the same."""

    kind: str
    source: Path
    path: Path
    dtype: str
    written: quantize.Written


class Reference:
    """The model in transformers with dequantized weights, computing in float32.

    Args:
        quantized: quantize its inputs, keys and values too, as the engine does.
    """

    def __init__(self, of: Model, *, quantized: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.of, self.quantized = of, quantized
        # Factors of the scale and the offset when keys and values are read.
        self.read = {"k": (1.0, 1.0), "v": (1.0, 1.0)}
        self.model = (
            AutoModelForCausalLM.from_pretrained(of.source, dtype=getattr(torch, of.dtype))
            .eval()
            .float()
        )
        for name, stored in of.written.matrices.items():
            self.put(name, stored)
        for name, module in self.model.named_modules():
            matrix = of.written.matrices.get(name)
            if quantized and matrix is not None and matrix.spec.inputs != "none":
                module.register_forward_pre_hook(
                    lambda _, given, name=name: (self.inputs(name, given[0]),)
                )
            if name.endswith(".experts"):
                module.forward = functools.partial(self.experts, name, module)

    def put(self, name: str, matrix: Matrix) -> None:
        """Replace a matrix in the reference."""
        numbers = matrix.numbers().float()
        base, _, last = name.rpartition(".")
        if ".experts." not in name:
            self.model.get_submodule(name).weight.data = numbers
            return
        base, _, expert = base.rpartition(".")
        module = self.model.get_submodule(base)
        if last == "down_proj":
            module.down_proj.data[int(expert)] = numbers
        else:
            half = slice(None, len(numbers)) if last == "gate_proj" else slice(len(numbers), None)
            module.gate_up_proj.data[int(expert), half] = numbers

    def inputs(self, name: str, x: Any) -> Any:
        """Quantize and dequantize the input of a matrix."""
        matrix, shift = self.of.written.matrices[name], self.of.written.shifts.get(name, 0.0)
        if rounded := getattr(matrix.spec, "rounded", None):
            return rounded(x)
        if matrix.spec.inputs == "static":
            scale, offset = self.of.written.inputs[name]
            rounded = ((x + shift) / scale + offset).round().clamp(-128, 127)
            return (rounded - offset) * scale - shift
        if matrix.spec.inputs == "dynamic" and self.quantized:
            scale = (x + shift).abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
            return ((x + shift) / scale).round() * scale - shift
        return x

    def experts(self, name: str, module: Any, x: Any, ids: Any, weights: Any) -> Any:
        """Compute each expert in turn: transformers' grouped form does not expose the inputs."""
        import torch

        out = torch.zeros_like(x)
        for expert in range(len(module.down_proj)):
            token, place = (ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            first, second = (f"{name}.{expert}.{part}" for part in ("gate_proj", "down_proj"))
            gate, up = (self.expert_inputs(first, x[token]) @ module.gate_up_proj[expert].T).chunk(
                2, -1
            )
            inner = torch.nn.functional.silu(gate) * up
            output = self.expert_inputs(second, inner) @ module.down_proj[expert].T
            out.index_add_(0, token, output * weights[token, place, None])
        return out

    def expert_inputs(self, name: str, x: Any) -> Any:
        return self.inputs(name, x) if self.quantized and name in self.of.written.matrices else x

    def logprobs(self, tokens: list[int]) -> Any:
        """float32 ``[tokens, vocabulary]``."""
        import torch
        from transformers import DynamicCache

        scales, read = self.of.written.cache if self.quantized else {}, self.read

        class Cache(DynamicCache):
            def update(
                self,
                key_states: Any,
                value_states: Any,
                layer_idx: int,
                *arguments: Any,
                **named: Any,
            ) -> Any:
                keys_and_values = super().update(
                    key_states, value_states, layer_idx, *arguments, **named
                )
                return tuple(
                    rounded(x, layer_idx, part)
                    for x, part in zip(keys_and_values, "kv", strict=True)
                )

        def rounded(x: Any, layer: int, part: str) -> Any:
            if f"model.layers.{layer}.self_attn.{part}_proj" not in scales:
                return x
            scale, offset = (
                each.view(x.shape[1], 1, -1)
                for each in scales[f"model.layers.{layer}.self_attn.{part}_proj"]
            )
            factor, less = read[part]
            return ((x / scale + offset).round().clamp(-128, 127) - offset * less) * scale * factor

        cached = {"past_key_values": Cache(), "use_cache": True} if scales else {"use_cache": False}
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), **cached).logits[0].float().log_softmax(-1)

    def compare(self, served: list[list[dict[str, Any]]]) -> tuple[int, float, float]:
        """Number of tokens, and the largest and average log-probability difference from the
        reference."""
        count, _, max_diff, mean = layouts.distances(
            self.logprobs, self.model.config.vocab_size, served
        )
        return count, max_diff, mean

    def broken(self, served: list[list[dict[str, Any]]]) -> dict[tuple[str, str], float]:
        """Average differences when all matrices of one scheme are made wrong in one way."""
        failures = {}
        for spec in dict.fromkeys(matrix.spec for matrix in self.of.written.matrices.values()):
            changes = {"wrong scale": wrong_scale}
            changes |= {"swapped halves": swapped_halves} if spec.bits == 4 else {}
            changes |= {} if spec.symmetric else {"no offset": no_offset}
            mine = {
                name: matrix
                for name, matrix in self.of.written.matrices.items()
                if matrix.spec == spec
            }
            for title, change in changes.items():
                for name, matrix in mine.items():
                    self.put(name, change(matrix))
                failures[str(spec), title] = self.compare(served)[2]
            if spec.inputs == "static" and self.quantized:
                kept = dict(self.of.written.inputs)
                for name, (scale, offset) in kept.items():
                    self.of.written.inputs[name] = scale, offset - 8
                failures[str(spec), "no input offset"] = self.compare(served)[2]
                self.of.written.inputs.update(kept)
            for name, matrix in mine.items():
                self.put(name, matrix)
        for part in "kv" if self.of.written.cache and self.quantized else "":
            self.read[part] = 1.25, 1.0
            failures["int8 KV cache", f"wrong scale of {part}"] = self.compare(served)[2]
            if part == "v":  # Keys that are all shifted by the same value have the same attention.
                self.read[part] = 1.0, 0.0
                failures["int8 KV cache", "no offset of v"] = self.compare(served)[2]
            self.read[part] = 1.0, 1.0
        return failures


# Errors that a bound has to distinguish from a right answer.


def wrong_scale(matrix: Matrix) -> Matrix:
    """Scales that are 10 % too large."""
    return Matrix(matrix.spec, matrix.values, matrix.scale * 1.1, matrix.zero)


def swapped_halves(matrix: Matrix) -> Matrix:
    """The two 4-bit values of each byte, swapped."""
    return Matrix(
        matrix.spec,
        matrix.values.unflatten(1, (-1, 2)).flip(-1).flatten(1),
        matrix.scale,
        matrix.zero,
    )


def no_offset(matrix: Matrix) -> Matrix:
    return Matrix(matrix.spec, matrix.values, matrix.scale, matrix.zero * 0)
