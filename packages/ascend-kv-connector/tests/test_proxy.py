# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Router in front of servers that respond as vLLM does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from ascend_kv_connector.proxy import METASERVER, PATHS, Router

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}


def ask(
    body: Any, prefill: Callable, decode: Callable, stop: str = ""
) -> tuple[int, str, list[tuple[str, dict, str]]]:
    """Status and text that the client gets, and the requests that the instances received; ``stop``
    names an instance to stop."""
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
        router = TestClient(TestServer(Router(urls[:1], urls[1:]).application()))
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
    ("prefill", "stop", "status", "said"),
    [
        (first, "prefill", 502, "the prefill instance at http://127.0.0.1"),
        (first, "decode", 502, "the decode instance at http://127.0.0.1"),
        (without, "", 502, "returned no kv_transfer_params; start it with"),
        (refuse, "", 400, "too long"),
    ],
)
def test_failures_are_reported(prefill: Callable, stop: str, status: int, said: str) -> None:
    got, text, _ = ask({"prompt": "6*7="}, prefill, second, stop)
    assert got == status
    assert said in text


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

    status, found = asyncio.run(run())
    assert status == 400
    assert found["error"]["message"] == (
        "the body is not a JSON object; fix: send one, as vLLM's API has it"
    )


async def of_another_kind(request: web.Request) -> web.Response:
    return web.json_response([PARAMS])


def test_prefill_that_answers_with_something_else_is_reported() -> None:
    status, text, asked = ask({"prompt": "6*7="}, of_another_kind, second)
    assert (status, len(asked)) == (502, 1)
    assert "returned no kv_transfer_params; start it with" in text
