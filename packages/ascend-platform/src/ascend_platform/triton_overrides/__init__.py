"""PyTorch implementations of vLLM's Triton kernels."""
