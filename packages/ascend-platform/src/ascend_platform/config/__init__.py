"""Checks of vLLM's configuration, and the defaults that it has on Ascend NPUs."""
