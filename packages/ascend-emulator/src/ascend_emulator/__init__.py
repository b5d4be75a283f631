"""CANN's shared libraries, computed on the CPU, so that the real torch_npu runs with no NPU."""

from ascend_emulator.activation import activate

__all__ = ["activate"]
