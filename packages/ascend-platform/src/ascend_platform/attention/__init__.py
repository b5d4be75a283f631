"""Attention backends in plain PyTorch, the base classes of all attention backends, and the KV
cache's layout."""
