"""Model architectures that are refused, with what CANN's public operators lack for them."""

from __future__ import annotations

from ascend_platform import extension

_MHC = "hyper-connections (npu_mhc_pre, which is for the next generation of chips)"
_COMPRESSED = f"attention over compressed keys and values, its compressor, and {_MHC}"
_OTHERS = "the kernels that vLLM has for CUDA and ROCm alone"

LACKING = {
    "deepseek_v4": _COMPRESSED,
    "deepseek_v41": _COMPRESSED,
    "dots3_note": _OTHERS,
    "glm5next": _OTHERS,
    "hy_v4": f"latent attention with sinks, and {_MHC}",
    "inkling": _OTHERS,
    "kimi_k3": "prefill of Kimi delta attention",
    "minimax_m3": "MiniMax's sparse attention by blocks of keys",
    "qwen4_exp": _MHC,
}
"""What CANN lacks, by the package of ``vllm.models`` that has the architecture; such packages have code for named platforms."""


def refusal(architecture: str) -> str:
    """Why an architecture is refused, in one line; "" if it is not."""
    from vllm.model_executor.models.registry import ModelRegistry

    module = str(getattr(ModelRegistry.models.get(architecture), "module_name", ""))
    package = module.removeprefix("vllm.models.").partition(".")[0] if module.startswith("vllm.models.") else ""
    if package not in LACKING:
        return ""
    return (
        f"{architecture} is not supported by ascend-platform {extension.version('ascend-platform')}: CANN's operators lack "
        f"{LACKING[package]}; fix: serve another model"
    )


def check(architecture: str) -> None:
    """Refuse an architecture of the table.

    Raises:
        RefusedError: what CANN lacks, in one line.
    """
    if line := refusal(architecture):
        raise extension.RefusedError(line)
