"""Checkpoint formats of quantized models."""
