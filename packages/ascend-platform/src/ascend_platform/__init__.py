# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The Ascend NPU as a platform of vLLM: device, worker, model runner and operators."""


def register() -> str | None:
    """Entry point of group ``vllm.platform_plugins``; never raises.

    Devices are counted without creating a context on one. vLLM calls it twice in each process
    (``vllm/platforms/__init__.py``).

    Returns:
        The qualified name of the platform class if torch_npu and an NPU are present; otherwise
        None, and the reason is logged in one line.
    """
    from ascend_platform import plugins
    from ascend_platform.process import registration

    if plugins.not_activated is None:
        plugins.not_activated = registration.reason_against()
        if not plugins.not_activated:
            registration.prepare_process()
    return None if plugins.not_activated else "ascend_platform.platform.NPUPlatform"
