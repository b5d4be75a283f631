# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metaserver client: a decode instance that has allocated blocks for a prompt posts a prefill
request to the router."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from ascend_transfer.errors import printable

ANSWER_BYTES = 200
"""Bytes of a router's answer that are logged."""

MAX_CONNECTIONS = 1024
"""Connections to routers at a time; each waits for a prefill."""

REQUEST_ID_SUFFIX_LENGTH = 9
"""vLLM appends a hyphen and eight random characters to a request id, which the router does not know
(``vllm/v1/engine/input_processor.py``, ``assign_request_id``)."""


def external_request_id(request: str) -> str:
    """The request id as the router knows it."""
    kept = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0")
    return request if kept else request[:-REQUEST_ID_SUFFIX_LENGTH]


class MetaserverClient:
    """Posts from a background thread, started with the first post. A router may reply only after
    the prefill."""

    def __init__(self, seconds: float, on_failure: Callable[[str, str], None]) -> None:
        """``on_failure(request, cause)`` is called in that thread for each post that the router
        rejects or does not accept in ``seconds``."""
        self._seconds, self._on_failure = seconds, on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: ClientSession | None = None

    def post(self, request: str, url: str, message: dict[str, Any]) -> None:
        """Post the prefill request for a request."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(
                    target=self._run, args=[loop], name="kv-client", daemon=True
                ).start()
            except RuntimeError as error:  # too many processes and threads
                loop.close()
                self._on_failure(request, f"cannot post to the router at {url}: {error}")
                return
            self._loop = loop
        asyncio.run_coroutine_threadsafe(self._post(request, url, message), self._loop)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run a loop until it is stopped, and close its sockets."""
        loop.run_forever()
        loop.run_until_complete(_cancel_posts())
        if self._session is not None:
            loop.run_until_complete(self._session.close())
        loop.close()

    async def _post(self, request: str, url: str, message: dict[str, Any]) -> None:
        # One pool for all posts: each keeps a connection for as long as the prefill takes.
        if self._session is None:
            timeout = ClientTimeout(total=self._seconds, sock_connect=10)
            # A reused connection may close while a post is sent.
            connector = TCPConnector(limit=most_connections(), force_close=True)
            self._session = ClientSession(
                connector=connector, timeout=timeout, cookie_jar=DummyCookieJar()
            )
        try:
            async with self._session.post(url, json=message, allow_redirects=False) as answer:
                if answer.status >= 300:
                    text = printable(
                        (await answer.content.read(ANSWER_BYTES)).decode(errors="replace")
                    )
                    self._on_failure(
                        request, f"the router at {url} replied {answer.status}: {text}"
                    )
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            cause = printable(f"{type(error).__name__}: {error}")
            self._on_failure(request, f"cannot reach the router at {url}: {cause}")


def most_connections() -> int:
    """Connections to routers at a time: posts beyond that wait. A quarter of the files that this
    process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, files // 4))


async def _cancel_posts() -> None:
    posts = asyncio.all_tasks() - {asyncio.current_task()}
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
