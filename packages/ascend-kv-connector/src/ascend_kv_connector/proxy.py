"""A router for trying prefill and decode instances out: ``python -m ascend_kv_connector.proxy --prefill URL… --decode URL…``.

It sends each completion to a prefill instance for its first token and then, with what that answers, to a decode instance, each
kind in turn. With ``--layerwise`` it is the other way round: the decode instance takes blocks and posts to the router, that sends
the prompt to a prefill instance with what was posted, and the KV cache goes over layer by layer while that computes it.

It has no queues, retries or health checks; for real use take a router that has, such as vLLM's own or llm-d.
"""

from __future__ import annotations

import argparse
import itertools
import json
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

SESSION = web.AppKey("session", ClientSession)
PATHS = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}
"""By path how vLLM's server names a request with this X-Request-Id (``vllm/entrypoints/openai``)."""

METASERVER = "/v1/metaserver"
"""Where a decode instance asks for the prefill of its request, as vllm-ascend calls it."""


def application(prefill: Sequence[str], decode: Sequence[str], layerwise: str = "") -> web.Application:
    """The router over base URLs such as ``http://10.0.0.1:8100``; ``layerwise`` is its own, if prompts go over layer by layer."""
    instances = [itertools.cycle(url.rstrip("/") for url in urls) for urls in (prefill, decode)]
    app = web.Application(client_max_size=64 << 20)
    waiting: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {}

    async def session(app: web.Application) -> Any:
        app[SESSION] = ClientSession(timeout=ClientTimeout(total=None, sock_connect=10))
        yield
        await app[SESSION].close()

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.text())
            assert isinstance(body, dict)
        except (ValueError, AssertionError):
            return _error(400, "the body is not a JSON object")
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        headers |= {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        if layerwise:
            params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": layerwise.rstrip("/") + METASERVER}
            name = PATHS[request.path].format(headers["X-Request-Id"])
            waiting[name] = request.path, body, headers
            try:
                return await send_to_decode(request, body, headers, params)
            finally:
                waiting.pop(name, None)
        first = _prefill_body(body, {"do_remote_decode": True})
        where = next(instances[0]) + request.path
        try:
            async with request.app[SESSION].post(where, json=first, headers=headers) as answer:
                text = await answer.text()
            if answer.status != 200:
                return web.Response(status=answer.status, text=text, content_type="application/json")
            params = json.loads(text).get("kv_transfer_params")
        except (ClientError, ValueError, TimeoutError) as error:
            return _error(502, f"the prefill instance at {where} has failed: {type(error).__name__}: {error}")
        if not params:
            return _error(
                502, f"{where} answers without kv_transfer_params; start it with --kv-transfer-config and kv_role kv_producer"
            )
        return await send_to_decode(request, body, headers, params)

    async def metaserver(request: web.Request) -> web.StreamResponse:
        """A decode instance has blocks for a request and asks for its prefill."""
        params = json.loads(await request.text())
        if params.get("request_id") not in waiting:
            return _error(404, f"no request {params.get('request_id')!r} is waiting here")
        path, body, headers = waiting[params["request_id"]]
        where = next(instances[0]) + path
        try:
            async with request.app[SESSION].post(where, json=_prefill_body(body, params), headers=headers) as answer:
                return web.Response(status=answer.status, text=await answer.text(), content_type="application/json")
        except (ClientError, TimeoutError) as error:
            return _error(502, f"the prefill instance at {where} has failed: {type(error).__name__}: {error}")

    async def send_to_decode(
        request: web.Request, body: dict[str, Any], headers: dict[str, str], params: dict[str, Any]
    ) -> web.StreamResponse:
        where = next(instances[1]) + request.path
        response = None
        try:
            async with request.app[SESSION].post(where, json=body | {"kv_transfer_params": params}, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
        except (ClientError, TimeoutError) as error:
            if response is not None:
                raise  # the client has a part of the answer, and its connection ends
            return _error(502, f"the decode instance at {where} has failed: {type(error).__name__}: {error}")
        return response

    app.cleanup_ctx.append(session)
    for path in PATHS:
        app.router.add_post(path, complete)
    app.router.add_post(METASERVER, metaserver)
    return app


def _prefill_body(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """What a prefill instance is sent: the same for one token."""
    first = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "max_completion_tokens")}
    return first | {"max_tokens": 1, "kv_transfer_params": params}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "proxy_error", "code": status}}, status=status)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ascend_kv_connector.proxy", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="base URLs of prefill instances")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="base URLs of decode instances")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--layerwise", metavar="URL", default="", help="send KV cache layer by layer; URL is this router's own")
    given = parser.parse_args()
    web.run_app(application(given.prefill, given.decode, given.layerwise), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
