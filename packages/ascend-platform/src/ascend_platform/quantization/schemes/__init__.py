"""Quantization schemes, one module each."""
