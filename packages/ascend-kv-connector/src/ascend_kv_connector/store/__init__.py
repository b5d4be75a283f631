"""A pool of KV cache that instances share: ``AscendStoreConnector``, and the tiers behind host memory that it is made of."""
