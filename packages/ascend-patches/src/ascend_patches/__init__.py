"""Patches of vLLM: each for a range of versions, in one kind of process, bound to the source that it was written against."""

from ascend_patches.apply import enter, register
from ascend_patches.registry import SCOPES, Patch, patch

__all__ = ["SCOPES", "Patch", "enter", "patch", "register"]
