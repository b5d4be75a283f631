# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small decoder models with random weights."""

from pathlib import Path


def qwen3(directory: Path) -> str:
    """A Qwen3 with two key heads, written to the directory; in float32 another order of sums moves
    no choice."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,  # choices with clear margins
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
