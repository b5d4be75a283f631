# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Router for trying out prefill and decode instances: ``python -m ascend_kv_connector.proxy
--prefill URL… --decode URL…``.

It sends each completion to a prefill instance for one token and then, with the returned parameters,
to a decode instance, both round-robin. With ``--layerwise`` the decode instance is first: it
allocates blocks and posts to the router, which sends the prompt with these parameters to a prefill
instance, and the KV cache is transferred layer by layer during the prefill.

A list of prompts goes only to a decode instance: a prefill instance answers with the parameters of
the first prompt only. A request whose X-Request-Id another one has gets a part of its own behind
it, by which the instances tell the two apart. It has no queues, retries or health checks; in
production use a router such as vLLM's own or llm-d.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from ascend_kv_connector.p2p.params import TransferParams

logger = logging.getLogger(__name__)

SESSION = web.AppKey("session", ClientSession)
PATHS = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}
"""vLLM's request id for an X-Request-Id, by path (``vllm/entrypoints/openai``)."""

NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
)
"""Parameters of a request that would let a prefill instance generate more than one token."""

PREFILL_SECONDS, SILENT_SECONDS = 120.0, 600.0
"""Defaults of the options, for a prefill and for an instance that sends nothing."""

METASERVER = "/v1/metaserver"
"""Path where a decode instance requests a prefill; vllm-ascend's name."""

JSON = "application/json"

NO_OBJECT = "the body is not a JSON object; fix: send one, as vLLM's API has it"


class Waiting(NamedTuple):
    """A request whose decode instance has not asked for its prefill."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class Router:
    """The router for base URLs such as ``http://10.0.0.1:8100``; ``layerwise`` is its own URL, for
    layer-by-layer transfers. A prefill may take ``prefill_timeout`` seconds; a decode instance that
    sends nothing for ``timeout`` seconds counts as failed."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        layerwise: str = "",
        prefill_timeout: float = PREFILL_SECONDS,
        timeout: float = SILENT_SECONDS,
    ) -> None:
        self._prefill, self._decode = (
            itertools.cycle(url.rstrip("/") for url in urls) for urls in (prefill, decode)
        )
        self._layerwise = layerwise.rstrip("/")
        self._prefill_timeout = ClientTimeout(total=prefill_timeout, sock_connect=10)
        self._decode_timeout = ClientTimeout(total=None, sock_connect=10, sock_read=timeout)
        self._waiting: dict[str, Waiting] = {}
        self._names: set[str] = set()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(_session)
        for path in PATHS:
            app.router.add_post(path, self.complete)
        app.router.add_post(METASERVER, self.metaserver)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if (body := _json_object(await request.read())) is None:
            return _error(400, NO_OBJECT)
        name = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        if name in self._names:
            name = f"{name}-{uuid.uuid4().hex}"
        self._names.add(name)
        try:
            headers = {"X-Request-Id": name} | {
                name: request.headers[name]
                for name in ("Authorization",)
                if name in request.headers
            }
            return await self._complete(request, body, headers)
        finally:
            self._names.discard(name)

    async def _complete(
        self, request: web.Request, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        if _has_several_prompts(body):
            return await self._send_to_decode(request, body, headers, None)
        if self._layerwise:
            return await self._decode_first(request, body, headers)
        first = _prefill_body(body, TransferParams(do_remote_decode=True).to_dict())
        where = next(self._prefill) + request.path
        try:
            async with request.app[SESSION].post(
                where, json=first, headers=headers, timeout=self._prefill_timeout
            ) as answer:
                text = await answer.text()
            if answer.status != 200:
                return web.Response(status=answer.status, text=text, content_type=JSON)
        except (ClientError, ValueError, TimeoutError) as error:
            return _failure("prefill", where, error, self._prefill_timeout.total)
        params = (_json_object(text) or {}).get("kv_transfer_params")
        if not isinstance(params, dict) or not params:
            return _error(
                502,
                f"{where} returned no kv_transfer_params; start it with --kv-transfer-config and"
                " kv_role kv_producer",
            )
        return await self._send_to_decode(request, body, headers, params)

    async def metaserver(self, request: web.Request) -> web.StreamResponse:
        """A decode instance has blocks for a request and asks for its prefill."""
        if (params := _json_object(await request.read())) is None:
            return _error(400, NO_OBJECT)
        name = str(params.get("request_id"))
        # With n > 1 vLLM numbers them, "0_cmpl-…".
        wanted = self._waiting.get(name) or self._waiting.get(re.sub(r"^\d+_", "", name))
        if wanted is None:
            return _error(404, f"unknown request {name!r}")
        where = next(self._prefill) + wanted.path
        try:
            async with request.app[SESSION].post(
                where,
                json=_prefill_body(wanted.body, params),
                headers=wanted.headers,
                timeout=self._prefill_timeout,
            ) as answer:
                return web.Response(
                    status=answer.status, text=await answer.text(), content_type=JSON
                )
        except (ClientError, ValueError, TimeoutError) as error:
            return _failure("prefill", where, error, self._prefill_timeout.total)

    async def _decode_first(
        self, request: web.Request, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        params = TransferParams(
            do_remote_prefill=True, do_remote_decode=False, metaserver=self._layerwise + METASERVER
        )
        name = PATHS[request.path].format(headers["X-Request-Id"])
        self._waiting[name] = Waiting(request.path, body, headers)
        try:
            return await self._send_to_decode(request, body, headers, params.to_dict())
        finally:
            self._waiting.pop(name, None)

    async def _send_to_decode(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: dict[str, str],
        params: dict[str, Any] | None,
    ) -> web.StreamResponse:
        where = next(self._decode) + request.path
        body = body | {"kv_transfer_params": params} if params else body
        response: web.StreamResponse | None = None
        try:
            async with request.app[SESSION].post(
                where, json=body, headers=headers, timeout=self._decode_timeout
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status,
                    headers={"Content-Type": answer.headers.get("Content-Type", JSON)},
                )
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
        except (ClientError, TimeoutError) as error:
            if response is None:
                return _failure("decode", where, error, self._decode_timeout.sock_read)
            # A part of the response was sent. If its client has not left, it sees that it is cut.
            if request.transport is not None and not request.transport.is_closing():
                logger.warning("%s", _cause("decode", where, error))
                request.transport.close()
        return response


async def _session(app: web.Application) -> AsyncIterator[None]:
    app[SESSION] = ClientSession()
    yield
    await app[SESSION].close()


def _failure(role: str, where: str, error: Exception, seconds: float | None) -> web.Response:
    if isinstance(error, TimeoutError):
        return _error(
            504,
            f"the {role} instance at {where} did not answer in {seconds:g} s; fix: check its log",
        )
    return _error(502, _cause(role, where, error))


def _cause(role: str, where: str, error: Exception) -> str:
    return f"the {role} instance at {where} failed: {type(error).__name__}: {error}"


def _prefill_body(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill instance: the same with one token."""
    first = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
    return first | {"max_tokens": 1, "kv_transfer_params": params}


def _json_object(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object; None if the text is anything else."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _has_several_prompts(body: dict[str, Any]) -> bool:
    """Whether ``prompt`` is a list of prompts, and not one of token ids."""
    prompt = body.get("prompt")
    return (
        isinstance(prompt, list)
        and len(prompt) > 1
        and not all(isinstance(each, int) for each in prompt)
    )


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "proxy_error", "code": status}}, status=status
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m ascend_kv_connector.proxy",
        description=" ".join(str(__doc__).partition("\n\n")[0].split()),
    )
    parser.add_argument(
        "--prefill", nargs="+", required=True, metavar="URL", help="base URLs of prefill instances"
    )
    parser.add_argument(
        "--decode", nargs="+", required=True, metavar="URL", help="base URLs of decode instances"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--layerwise",
        metavar="URL",
        default="",
        help="layer-by-layer transfers; URL is this router's own",
    )
    parser.add_argument(
        "--prefill-timeout",
        type=float,
        default=PREFILL_SECONDS,
        metavar="SECONDS",
        help="limit of a prefill (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=SILENT_SECONDS,
        metavar="SECONDS",
        help="limit of a decode instance that sends nothing (default: %(default)g)",
    )
    options = parser.parse_args()
    router = Router(
        options.prefill, options.decode, options.layerwise, options.prefill_timeout, options.timeout
    )
    # A client that leaves ends its requests to the instances.
    web.run_app(
        router.application(), host=options.host, port=options.port, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
