"""Shared pool of KV cache: ``AscendStoreConnector`` and its secondary tiers behind host memory."""
