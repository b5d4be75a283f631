"""KV cache transfer for vLLM on Ascend NPUs. This version registers itself and has no features yet."""

from ascend_platform import extension


def register() -> None:
    """Report this component to ascend-platform; never raises.

    The entry point of group ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once.
    ascend-platform compares the requirements that this wheel declares with what is installed and shows the result in
    its summary line.
    """
    extension.join("ascend-kv-connector", "ascend_kv_connector", note="no features in this version", api="1.0")
