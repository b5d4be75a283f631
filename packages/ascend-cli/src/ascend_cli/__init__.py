# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend`` with its subcommands, and one-line explanations of the errors that
end vLLM's commands."""

from ascend_platform import extension


def register() -> None:
    """Register with ascend-platform; never raises.

    Entry point of group ``vllm.general_plugins``: vLLM calls it in every process, possibly more
    than once. The group ``vllm_ascend.diagnostics`` names :mod:`ascend_cli.diagnostics`.
    """
    extension.join("ascend-cli", "ascend_cli", api="1.7")
