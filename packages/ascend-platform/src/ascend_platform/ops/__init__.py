"""vLLM's layers on fused NPU operators."""
