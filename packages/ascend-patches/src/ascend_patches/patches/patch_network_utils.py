# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm serve` goes on after a SIGTERM that comes while its engine starts, and waits for an engine
that has ended."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ascend_patches import patch


@patch(
    target="vllm.utils.network_utils:zmq_socket_ctx",
    scope="platform",
    vllm=">=0.31,<0.34",
    reason=(
        "`vllm serve` drops the KeyboardInterrupt by which SIGTERM ends it while the engine starts,"
        " and waits for ten minutes"
    ),
    upstream=(
        "no issue is known; the exception is in vllm/entrypoints/launchers/api_server/entry.py,"
        " run_server"
    ),
    remove_when="zmq_socket_ctx does not catch KeyboardInterrupt",
    fingerprint="e40313ef3e71",
)
def zmq_socket_ctx(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def replacement(*args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with original(*args, **kwargs) as socket:
            try:
                yield socket
            except KeyboardInterrupt as error:
                interrupt = error
                raise
        if interrupt:
            raise interrupt

    return replacement
