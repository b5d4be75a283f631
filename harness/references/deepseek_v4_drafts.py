# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Drafts of DeepSeek-V4's MTP layer in float32 on the CPU, of transformers' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class Drafter:
    """The MTP layer that ``harness/models/deepseek_v4.py`` has written beside a model.

    Args:
        model: transformers' model.
        folder: the layer as a model of one layer, and ``joins.safetensors``.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.layer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.joins = load_file(folder / "joins.safetensors")
        self._kept: dict[str, torch.Tensor] = {}
        for name, each in (("model", model), ("layer", self.layer)):
            each.model.hc_head.register_forward_pre_hook(
                lambda _, inputs, name=name: self._kept.update({name: inputs[0]})
            )
        self.layer.model.layers[0].register_forward_pre_hook(
            lambda _, inputs: (self._kept["joined"],)
        )

    @torch.no_grad()
    def streams(self, tokens: list[int]) -> torch.Tensor:
        """The model's streams after its last layer, ``[tokens, streams, hidden]``."""
        self.model(torch.tensor([tokens]))
        return self._kept["model"][0]

    @torch.no_grad()
    def step(self, streams: torch.Tensor, following: list[int]) -> tuple[int, torch.Tensor]:
        """The draft after the last of some tokens, and the layer's own streams there.

        Args:
            streams: of the first tokens of a request, ``[tokens, streams, hidden]``.
            following: the token after each.
        """
        embedded = self.layer.model.embed_tokens(torch.tensor(following))
        embedded[0] = 0
        normed = self._norm(streams, "hnorm") @ self.joins["h_proj.weight"].t()
        token = self._norm(embedded, "enorm") @ self.joins["e_proj.weight"].t()
        self._kept["joined"] = (normed + token.unsqueeze(1)).unsqueeze(0)
        logits = self.layer(inputs_embeds=embedded.unsqueeze(0)).logits
        return int(logits[0, -1].argmax()), self._kept["layer"][0, -1:]

    def drafts(self, streams: torch.Tensor, following: list[int], count: int) -> list[int]:
        """This many drafts after the last token, each of the one before."""
        drafts: list[int] = []
        for _ in range(count):
            draft, stream = self.step(streams, following + drafts)
            drafts.append(draft)
            streams = torch.cat((streams, stream))
        return drafts

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.joins[f"{name}.weight"]
        )
