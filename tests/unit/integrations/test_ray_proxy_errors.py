"""What clients of Serve's proxy get when a replica ends: an answer of another replica, or an error of OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from penstock.integrations.ray_serve import proxy_errors
from penstock.integrations.ray_serve.event_stream import ENDED
from penstock.integrations.ray_serve.proxy_errors import REPLAY_NBYTES, RETRY_DELAYS, ProxyErrors, middlewares

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"x")]}
Script = Callable[[Receive, Send], Awaitable[None]]  # what one replica does


class Replicas:
    """An application that is Serve's proxy: each call reaches the next replica, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"].append((b"x-request-id", b"1"))  # as Serve's own middleware does
        assert len(scope["headers"]) == 2
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body", False):
                break
        self.bodies.append(body)
        await self._scripts[min(len(self.bodies), len(self._scripts)) - 1](receive, send)


def answer(status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> Script:
    async def script(receive: Receive, send: Send) -> None:
        await send(start(status, content_type, *headers))
        await send({"type": "http.response.body", "body": body})

    return script


def start(status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *headers]}


async def die(receive: Receive, send: Send) -> None:
    """As Serve does where the actor of a replica has died: it writes nothing."""


def cut(*pieces: bytes, content_type: bytes = b"text/event-stream") -> Script:
    async def script(receive: Receive, send: Send) -> None:
        await send(start(200, content_type))
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    return script


WHOLE = answer(200, b"application/json", b"{}")
ENDING = answer(503, b"application/json", b'{"error":{"message":"ended"}}', ENDED, (b"retry-after", b"1"))


class Client:
    """Sends one request, and keeps the answer."""

    def __init__(self, *pieces: bytes, leaves: bool = False) -> None:
        self._pieces = list(pieces or (b"question",))
        self._leaves = leaves
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def start(self) -> Message:
        return self.messages[0]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.start["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_errors, "RETRY_DELAYS", (0.0,) * len(RETRY_DELAYS))


def ask(replicas: Replicas, client: Client) -> Client:
    asyncio.run(asyncio.wait_for(ProxyErrors(replicas)(SCOPE, client.receive, client.send), 10))
    return client


def error(client: Client) -> Any:
    assert client.headers[b"content-type"] == b"application/json" and client.is_complete
    return json.loads(client.body)["error"]


@pytest.mark.parametrize("loss", [die, ENDING], ids=["died", "ending"])
def test_request_goes_to_another_replica_when_its_own_ends(loss: Script) -> None:
    replicas = Replicas(loss, loss, WHOLE)
    client = ask(replicas, Client(b"a", b"bc"))
    assert (client.start["status"], client.body) == (200, b"{}")
    assert replicas.bodies == [b"abc"] * 3


@pytest.mark.parametrize("loss", [die, ENDING], ids=["died", "ending"])
def test_request_is_refused_with_503_when_each_replica_ends(loss: Script) -> None:
    replicas = Replicas(loss)
    client = ask(replicas, Client())
    assert client.start["status"] == 503 and client.headers[b"retry-after"] == b"1"
    assert "ended" in error(client)["message"]
    assert len(replicas.bodies) == 1 + len(RETRY_DELAYS)


@pytest.mark.parametrize(("nbytes", "attempts"), [(REPLAY_NBYTES, 2), (REPLAY_NBYTES + 1, 1)])
def test_body_beyond_the_limit_is_not_sent_again(nbytes: int, attempts: int) -> None:
    replicas = Replicas(die, WHOLE)
    client = ask(replicas, Client(bytes(nbytes)))
    assert client.start["status"] == (200 if attempts == 2 else 503)
    assert [len(body) for body in replicas.bodies] == [nbytes] * attempts


def test_stream_that_is_cut_ends_with_an_error_event() -> None:
    client = ask(Replicas(cut(b"data: 1\n", b"\ndata: 2\n\n"), WHOLE), Client())
    first, second, last, end = client.body.split(b"\n\n")
    assert (first, second, end) == (b"data: 1", b"data: 2", b"") and client.is_complete
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_error"


@pytest.mark.parametrize("script", [cut(b"data: 1"), cut(b"{", content_type=b"application/json")])
def test_answer_that_is_cut_within_an_event_or_a_text_stays_cut(script: Script) -> None:
    client = ask(Replicas(script, WHOLE), Client())
    assert client.start["status"] == 200 and client.body in (b"data: 1", b"{") and not client.is_complete


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_plain_error_of_serve_becomes_one_of_openai(status: int) -> None:
    replicas = Replicas(answer(status, b"text/plain; charset=utf-8", b"why"))
    client = ask(replicas, Client())
    assert client.start["status"] == status and error(client)["message"] == "why" and len(replicas.bodies) == 1
    assert (b"retry-after" in client.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    "script",
    [
        WHOLE,
        answer(200, b"text/plain", b"metrics"),
        answer(404, b"text/plain", b"no route"),
        answer(500, b"application/json", b"{}"),
        answer(503, b"application/json", b"{}", (b"retry-after", b"1")),
        cut(b"data: [DONE]\n\n"),
    ],
)
def test_answer_of_a_replica_passes_as_it_is(script: Script) -> None:
    direct, replicas = Client(), Replicas(script)
    asyncio.run(script(direct.receive, direct.send))
    client = ask(replicas, Client())
    assert client.messages[: len(direct.messages)] == direct.messages and len(replicas.bodies) == 1


def test_request_whose_client_has_left_is_not_sent_again() -> None:
    async def wait_for_client(receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"

    replicas = Replicas(wait_for_client, WHOLE)
    client = ask(replicas, Client(leaves=True))
    assert client.messages == [] and len(replicas.bodies) == 1


def test_lifespan_and_websockets_pass_through() -> None:
    types = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        types.append(scope["type"])

    client = Client()
    for kind in ("lifespan", "websocket"):
        asyncio.run(ProxyErrors(app)({"type": kind}, client.receive, client.send))
    assert types == ["lifespan", "websocket"]
    assert [middleware.cls for middleware in middlewares()] == [ProxyErrors]
