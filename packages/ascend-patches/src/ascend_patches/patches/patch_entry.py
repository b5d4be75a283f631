# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm serve`` exits with status 0 when its engine has died, so that a service manager does not
restart it."""

from collections.abc import Callable
from typing import Any


def build_and_serve(original: Callable[..., Any]) -> Callable[..., Any]:
    async def replacement(engine_client: Any, *args: Any, **kwargs: Any) -> Any:
        stop, stopped = engine_client.shutdown, []

        def shutdown(*args: Any, **kwargs: Any) -> Any:
            stopped.append(True)
            return stop(*args, **kwargs)

        # vLLM calls this on a signal (serve_http in vllm/entrypoints/launchers/launcher.py).
        engine_client.shutdown = shutdown
        ended = await original(engine_client, *args, **kwargs)
        return ended if stopped else _failed(ended)

    return replacement


async def _failed(ended: Any) -> None:
    await ended
    raise SystemExit(
        "vllm serve: the engine has died, and the server has ended with it; the first error above"
        " says why"
    )
