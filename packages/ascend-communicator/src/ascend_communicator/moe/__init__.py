"""Dispatch and combine of MoE tokens over expert-parallel ranks."""
