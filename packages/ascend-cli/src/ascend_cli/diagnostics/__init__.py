# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Diagnostics of vLLM's processes, the entry point of group ``vllm_ascend.diagnostics``; see
``ascend_platform.extension.Diagnostics``."""

import functools


def start_command() -> None:
    """Exit if vLLM's command cannot serve; otherwise let it end with one line if it fails."""
    from ascend_cli.diagnostics import excepthook

    excepthook.install()


def watch() -> None:
    """Note the errors that end this process or its child processes, unless ascend-cli is
    disabled."""
    from ascend_platform import extension

    import ascend_cli

    ascend_cli.register()
    if extension.state("ascend-cli") == "active":
        from ascend_cli.diagnostics import failures

        _forget_once()
        failures.watch()


def read_reports() -> None:
    """Read the causes that child processes have left."""
    from ascend_cli.diagnostics import failures

    failures.cause()


@functools.cache
def _forget_once() -> None:
    """Not at later calls, when child processes may have left their reports."""
    from ascend_cli.diagnostics import failures

    failures.forget()
