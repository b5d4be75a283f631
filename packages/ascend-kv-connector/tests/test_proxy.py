# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Router in front of servers that respond as vLLM does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from ascend_kv_connector.proxy import METASERVER, PATHS, Router

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}


def ask(
    body: Any,
    prefill: Callable,
    decode: Callable,
    stop: str = "",
    timeouts: tuple[float, ...] = (),
) -> tuple[int, str, list[tuple[str, dict, str]]]:
    """Status and text that the client gets, and the requests that the instances received; ``stop``
    names an instance to stop, ``timeouts`` are the router's."""
    asked: list[tuple[str, dict, str]] = []

    def server(
        name: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> TestServer:
        async def handle(request: web.Request) -> web.StreamResponse:
            asked.append((name, await request.json(), request.headers["X-Request-Id"]))
            return await answer(request)

        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        return TestServer(app)

    async def run() -> tuple[int, str]:
        servers = {"prefill": server("prefill", prefill), "decode": server("decode", decode)}
        for each in servers.values():
            await each.start_server()
        urls = [str(each.make_url("")).rstrip("/") for each in servers.values()]
        if stop:
            await servers[stop].close()
        data = body if isinstance(body, str) else json.dumps(body)
        router = TestClient(TestServer(Router(urls[:1], urls[1:], "", *timeouts).application()))
        async with router as client, client.post("/v1/completions", data=data) as answer:
            got = answer.status, await answer.text()
        for each in servers.values():
            await each.close()
        return got

    status, text = asyncio.run(run())
    return status, text, asked


async def first(request: web.Request) -> web.Response:
    return web.json_response({"choices": [{"text": "4"}], "kv_transfer_params": PARAMS})


async def second(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for token in "42":
        await response.write(f"data: {token}\n\n".encode())
    return response


def test_prefill_params_reach_decode_and_its_stream_the_client() -> None:
    body = {
        "prompt": "6*7=",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text, asked = ask(body, first, second)
    assert (status, text) == (200, "data: 4\n\ndata: 2\n\n")
    (one, to_prefill, name), (other, to_decode, same) = asked
    assert (one, other, name) == ("prefill", "decode", same)
    assert to_prefill == {
        "prompt": "6*7=",
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert to_decode == body | {"kv_transfer_params": PARAMS}


def test_prefill_generates_one_token_of_one_sequence() -> None:
    body = {"prompt": [6, 7], "max_tokens": 5, "min_tokens": 2, "n": 2, "best_of": 2}
    _, _, asked = ask(body, first, second)
    (_, to_prefill, _), (_, to_decode, _) = asked
    assert to_prefill == {
        "prompt": [6, 7],
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert to_decode == body | {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("prompts", [["6*7=", "2*3="], [[6, 7], [2, 3]]])
def test_list_of_prompts_is_computed_by_the_decode_instance(prompts: list) -> None:
    body = {"prompt": prompts, "max_tokens": 5}
    status, _, asked = ask(body, first, second)
    assert (status, [(name, sent) for name, sent, _ in asked]) == (200, [("decode", body)])


async def without(request: web.Request) -> web.Response:
    return web.json_response({"choices": []})


async def refuse(request: web.Request) -> web.Response:
    return web.json_response({"error": "too long"}, status=400)


@pytest.mark.parametrize(
    ("prefill", "stop", "status", "message"),
    [
        (first, "prefill", 502, "the prefill instance at http://127.0.0.1"),
        (first, "decode", 502, "the decode instance at http://127.0.0.1"),
        (without, "", 502, "returned no kv_transfer_params; start it with"),
        (refuse, "", 400, "too long"),
    ],
)
def test_failures_are_reported(prefill: Callable, stop: str, status: int, message: str) -> None:
    got, text, _ = ask({"prompt": "6*7="}, prefill, second, stop)
    assert got == status
    assert message in text


@pytest.mark.parametrize("path", [*PATHS, METASERVER])
@pytest.mark.parametrize(
    "body",
    [b"[1", b"", b"\xff", b"[]", b"null", b'"a"', b"[" * 100_000, '{"a": 1'.encode("utf-16")],
    ids=lambda body: str(body[:6]),
)
def test_malformed_request_is_refused(path: str, body: bytes) -> None:
    async def run() -> tuple[int, dict]:
        async with TestClient(TestServer(Router([""], [""]).application())) as client:
            headers = {"Content-Type": "application/json; charset=none"}
            async with client.post(path, data=body, headers=headers) as answer:
                return answer.status, await answer.json()

    status, result = asyncio.run(run())
    assert status == 400
    assert result["error"]["message"] == (
        "the body is not a JSON object; fix: send one, as vLLM's API has it"
    )


async def of_another_kind(request: web.Request) -> web.Response:
    return web.json_response([PARAMS])


def test_prefill_that_answers_with_something_else_is_reported() -> None:
    status, text, asked = ask({"prompt": "6*7="}, of_another_kind, second)
    assert (status, len(asked)) == (502, 1)
    assert "returned no kv_transfer_params; start it with" in text


async def silent(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    response = await second(request)
    assert isinstance(response, web.StreamResponse)
    request.transport.close()  # type: ignore[union-attr]
    return response


@pytest.mark.parametrize(
    ("prefill", "decode", "cause"),
    [
        (silent, second, "the prefill instance at http://127.0.0.1:"),
        (first, silent, "the decode instance at http://127.0.0.1:"),
    ],
)
def test_instance_that_sends_nothing_is_given_up(
    prefill: Callable, decode: Callable, cause: str
) -> None:
    began = monotonic()
    status, text, _ = ask({"prompt": "6*7="}, prefill, decode, timeouts=(0.5, 0.5))
    assert status == 504
    assert cause in text
    assert "did not answer in 0.5 s; fix: check its log" in text
    assert monotonic() - began < 10


def test_cut_stream_is_cut_for_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClientError):
        ask({"prompt": "6*7="}, first, cut)
    (line,) = caplog.records
    assert line.exc_info is None
    assert line.getMessage().startswith("the decode instance at http://127.0.0.1:")


@pytest.mark.parametrize("cancels", [False, True], ids=["at the next write", "at once"])
def test_client_that_hangs_up_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, cancels: bool
) -> None:
    """The instance sees that its own client has left. ``cancels``: aiohttp's handler_cancellation."""
    left: list[str] = []

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: 4\n\n" * 100)
                await asyncio.sleep(0.001)
        except ConnectionError:
            left.append("writing")
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", endless)
        runner = web.AppRunner(app)
        url = f"http://127.0.0.1:{await listen(runner)}"
        router = web.AppRunner(Router([url], [url]).application(), handler_cancellation=cancels)
        port = await listen(router)
        body = json.dumps({"prompt": ["a", "b"]}).encode()  # for the decode instance only
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: ")
            writer.write(b"%d\r\n\r\n%b" % (len(body), body))
            await reader.read(10)
            writer.close()
        until = monotonic() + 10
        while len(left) < 3 and monotonic() < until:
            await asyncio.sleep(0.05)
        await router.cleanup()
        await runner.cleanup()

    asyncio.run(run())
    assert left == ["writing"] * 3
    assert [each.getMessage() for each in caplog.records if each.exc_info] == []


async def listen(runner: web.AppRunner) -> int:
    """Start an application; its port."""
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


def test_requests_with_one_x_request_id_are_not_mixed_up() -> None:
    """Layer by layer: each decode instance asks for the prompt of the request that it has."""
    computed: list[tuple[str, str]] = []

    async def run() -> None:
        async def prefill(request: web.Request) -> web.Response:
            body = await request.json()
            computed.append((body["kv_transfer_params"]["of"], body["prompt"]))
            return web.json_response({})

        async def decode(request: web.Request) -> web.Response:
            """As vLLM names the request, and the connector asks for it."""
            body, name = await request.json(), request.headers["X-Request-Id"]
            await asyncio.sleep({"one": 0.6, "two": 0.3, "three": 0.0}[body["prompt"]])
            params = {"request_id": PATHS["/v1/completions"].format(name), "of": body["prompt"]}
            url = body["kv_transfer_params"]["metaserver"]
            async with ClientSession() as session, session.post(url, json=params) as answer:
                assert answer.status == 200
            return web.json_response({"choices": []})

        apps = []
        for handler in (prefill, decode):
            app = web.Application()
            app.router.add_post("/v1/completions", handler)
            apps.append(TestServer(app))
            await apps[-1].start_server()
        urls = [str(each.make_url("")).rstrip("/") for each in apps]
        router = Router(urls[:1], urls[1:], "layerwise")
        server = TestServer(router.application())
        await server.start_server()
        router._layerwise = str(server.make_url("")).rstrip("/")

        async def post(prompt: str, after: float) -> int:
            await asyncio.sleep(after)
            headers, body = {"X-Request-Id": "same"}, json.dumps({"prompt": prompt})
            async with client.post("/v1/completions", data=body, headers=headers) as answer:
                return answer.status

        async with TestClient(server) as client:
            sent = (post("one", 0.0), post("two", 0.1), post("three", 0.2))
            assert await asyncio.gather(*sent) == [200, 200, 200]
        assert (router._waiting, router._names) == ({}, set())
        for each in apps:
            await each.close()

    asyncio.run(run())
    assert sorted(computed) == [("one", "one"), ("three", "three"), ("two", "two")]
