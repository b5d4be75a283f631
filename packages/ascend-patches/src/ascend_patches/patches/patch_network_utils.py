# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm serve` goes on after a SIGTERM that comes while its engine starts, and waits for an engine
that has ended."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


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
