"""Quantization methods of layers: linear layers, experts, KV cache."""
