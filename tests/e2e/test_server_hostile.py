"""What no good client sends, and an unlucky one may: it is refused in words and in time, and others are served."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.http.connection import MAX_THROWN_NBYTES
from tests.e2e.test_server import AUTHORIZED, KEY, MAX_BODY, MAX_OPEN, Served, posted, run_server
from tests.shared_server import Scene, SharedServer, shared_server
from tests.support.loops import in_a_loop

PATIENCE = 1.0  # of the server, as `served` says
WITHIN = 5.0  # seconds until a client with a deadline of PATIENCE reports, on a busy machine
MAX_CONNECTIONS = 4 * MAX_OPEN
HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{AUTHORIZED}".encode()
MODELS = f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{AUTHORIZED}\r\n".encode()
ASKED = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


class Answer:
    def __init__(self, head: bytes, body: bytes) -> None:
        self.status = int(head.split()[1])
        self.headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head.decode().split("\r\n")[1:])
        }
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        """In OpenAI's form, or the test fails."""
        assert self.headers["content-type"] == "application/json", self.headers
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert error["type"] == error["code"] or error["code"]
        return dict(error)


async def send(writer: asyncio.StreamWriter, pieces: Any) -> None:
    """Until the server wants no more of them."""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass


async def answers(served: Served, *pieces: bytes, within: float = WITHIN) -> list[Answer]:
    """All that is said until the server ends the connection. Answers are read while the pieces are being sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    sending = asyncio.ensure_future(send(writer, pieces))
    received = []
    try:
        while True:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), within)
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            received.append(Answer(head[:-4], await asyncio.wait_for(reader.readexactly(int(length[1])), within)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return received
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def answer(served: Served, *pieces: bytes) -> Answer:
    received = await answers(served, *pieces)
    assert len(received) == 1, [answer.status for answer in received]
    return received[0]


def closing(request: bytes) -> bytes:
    return request.replace(b"\r\nhost: x\r\n", b"\r\nhost: x\r\nconnection: close\r\n", 1)


def sized(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


# ── slow senders ─────────────────────────────────────────────────────────────────────────────────────────────────
async def dripping(piece: bytes, times: int = 200) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield piece
        await asyncio.sleep(0.05)


async def who_says_nothing_or_half_a_head_is_told_that_it_is_too_late(served: Served) -> None:
    answers = await asyncio.gather(*(answer(served, *pieces) for pieces in ((), (b"GET /v1/mod",), (b"\r\n\r\n",))))
    assert [(answer.status, bool(answer.error)) for answer in answers] == [(408, True)] * 3


async def a_head_or_a_body_that_drips_wins_no_time(served: Served) -> None:
    async def drip(before: bytes, piece: bytes) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(before)

        async def go_on() -> None:
            async for byte in dripping(piece):
                writer.write(byte)

        dropping = asyncio.ensure_future(go_on())
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN)
            return Answer(head[:-4], await asyncio.wait_for(reader.read(), WITHIN))
        finally:
            dropping.cancel()
            writer.transport.abort()

    received = await asyncio.gather(
        drip(b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        drip(HEAD + b"content-length: 5000\r\n\r\n", b" "),
        drip(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drip(HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"x"),
        drip(HEAD + b"content-length: 5000\r\n\r\n", b""),
    )
    assert [(answer.status, bool(answer.error)) for answer in received] == [(408, True)] * 5
    assert await served.total("penstock_open_requests") == 0


async def a_body_may_take_longer_than_the_patience_if_it_comes(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    body = b" " * 60_000 + ASKED
    writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    for at in range(0, len(body), 6000):
        writer.write(body[at : at + 6000])
        await asyncio.sleep(0.2)
    assert b"200 OK" in await asyncio.wait_for(reader.read(), WITHIN)
    writer.close()


async def as_many_as_may_be_connected_are_and_the_others_are_told(served: Served) -> None:
    both = 2 * MAX_CONNECTIONS
    ends = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(both + 20)]
    try:
        responses = await asyncio.gather(*(asyncio.wait_for(reader.read(), WITHIN) for reader, _ in ends))
    finally:
        for _, writer in ends:
            writer.transport.abort()
    statuses = [int(response.split()[1]) for response in responses if response]
    assert statuses.count(503) >= 20 and statuses.count(408) + statuses.count(503) == len(ends)
    refused = next(response for response in responses if b" 503 " in response)
    assert b"retry-after: 1" in refused.lower() and b'"type":"server_error"' in refused
    deadline = asyncio.get_running_loop().time() + WITHIN
    while (await answer(served, closing(MODELS))).status != 200:  # until the servers have seen them go
        assert asyncio.get_running_loop().time() < deadline, "there is no room again"
        await asyncio.sleep(0.05)


# ── senders of too much ───────────────────────────────────────────────────────────────────────────────────────────────
def without_end(before: bytes, piece: bytes) -> list[bytes]:
    """More than anybody keeps."""
    return [before, *[piece * (65536 // len(piece))] * 200]


async def what_has_no_end_is_cut_off(served: Served) -> None:
    for before, piece, status in (
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"400\r\n" + b" " * 1024 + b"\r\n", 413),
        (HEAD + b"content-length: 100000000000\r\n\r\n", b" ", 413),
        (HEAD + b"content-length: 99999999999999999999999999\r\n\r\n", b" ", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"x", 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n \r\n0\r\n", b"a: b\r\n", 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n \r\n0\r\na: ", b"b", 431),
        (HEAD, b"a: b\r\n", 431),
        (HEAD + b"a: ", b"b", 431),
        (HEAD, b"b", 431),
        (b"GET /", b"b", 431),
        (b"", b"b", 400),
        (HEAD.replace(KEY.encode(), b"wrong") + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", 401),
    ):
        refused = await answer(served, *without_end(before, piece))
        assert (refused.status, bool(refused.error)) == (status, True), before


async def requests_without_end_behind_one_that_is_answered_end_the_connection(served: Served) -> None:
    stream = posted("/v1/completions", {"prompt": "x", "max_tokens": 4000, "stream": True})
    for more in (
        MODELS,
        HEAD + b"content-length: 90000\r\n\r\n" + b" " * 90000,
        b"GET / HTTP/1.1\r\na: " + b"b" * 70000,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await send(writer, [stream])
        await reader.readuntil(b"data: ")
        await asyncio.wait_for(send(writer, [more * 20] * 100), 2 * WITHIN)
        await served.until(lambda: served.number(StatusBoard.OPEN) == 0, within=WITHIN)
        writer.transport.abort()


# ── requests one after the other ─────────────────────────────────────────────────────────────────────────────────────
async def pipelined_requests_are_answered_in_their_order(served: Served) -> None:
    received = await answers(served, MODELS + sized(ASKED) + MODELS + sized(b"{}") + closing(MODELS))
    assert [answer.status for answer in received] == [200, 200, 200, 400, 200]
    assert [b"text_completion" in answer.body for answer in received] == [False, True, False, False, False]


async def a_client_that_goes_takes_all_its_requests_with_it(served: Served) -> None:
    long = posted("/v1/completions", {"prompt": "x", "max_tokens": 4000})
    streamed = posted("/v1/completions", {"prompt": "x", "max_tokens": 4000, "stream": True})
    for at_once, later in (
        *((long + long + MODELS, b""), (long, long + MODELS), (long, HEAD + b"content-le")),
        (streamed, b""),
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(at_once)
        await served.until(lambda: served.number(StatusBoard.OPEN) == 1)
        writer.write(later)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await served.until(lambda: served.number(StatusBoard.OPEN) == 0, within=2.0)  # the answer takes 8 s
    await served.must_be_empty()


async def methods_that_a_route_has_not_are_named_with_those_it_has(served: Served) -> None:
    for method, path, allowed in (
        ("OPTIONS", "/v1/completions", {"POST"}),
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models/simulated", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("TRACE", "/openapi.json", {"GET", "HEAD"}),
    ):
        refused = await answer(served, closing(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{AUTHORIZED}\r\n".encode()))
        assert refused.status == 405 and refused.error
        assert set(refused.headers["allow"].split(", ")) == allowed, (method, path)


async def a_path_without_a_route_is_answered_with_the_nearest(served: Served) -> None:
    for path, nearest in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/model", "/v1/models"),
        ("/tokenise", "/tokenize"),
        ("/completions", "/v1/completions"),
        ("/v1/files", None),
        ("/v1/audio/speech", None),
        ("/" + "x" * 5000, None),
    ):
        refused = await answer(served, closing(f"POST {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()))
        assert (refused.status, refused.error["type"]) == (404, "not_found_error")
        message = refused.error["message"]
        way_out = f"the nearest is {nearest}" if nearest else "/openapi.json lists all"
        assert path[:900] in message and message.endswith(f": {way_out}"), message


async def an_answer_has_the_id_of_its_request(served: Served) -> None:
    async def ask(request: bytes, more: bytes) -> Answer:
        return await answer(served, closing(request).replace(b"\r\nhost: x\r\n", b"\r\nhost: x\r\n" + more, 1))

    for request, status in (
        (MODELS, 200),
        (sized(ASKED), 200),
        (sized(b"{}"), 400),
        (MODELS.replace(KEY.encode(), b"wrong"), 401),
        (MODELS.replace(b"/v1/models", b"/v1/nowhere"), 404),
        (MODELS.replace(b"GET", b"PUT"), 405),
    ):
        first, second = await ask(request, b""), await ask(request, b"")
        assert first.status == status and len({response.headers["x-request-id"] for response in (first, second)}) == 2
        assert (await ask(request, b"X-Request-Id: mine/1\r\n")).headers["x-request-id"] == "mine/1"
        for odd in (b"a b", b"x" * 129, b"\xc3\xa4", b""):
            named = (await ask(request, b"x-request-id: " + odd + b"\r\n")).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{24}", named), odd
    body = sized(json.dumps({"prompt": "x", "max_tokens": 1, "request_id": "of-the-body"}).encode())
    assert json.loads((await ask(body, b"")).body)["id"] == "cmpl-of-the-body"
    assert json.loads((await ask(body, b"x-request-id: mine\r\n")).body)["id"] == "cmpl-mine"
    for odd in ("a\r\nset-cookie: b", "a\n", ""):
        refused = await ask(sized(json.dumps({"prompt": "x", "request_id": odd}).encode()), b"")
        assert (refused.status, refused.error["param"]) == (400, "request_id")


async def what_is_no_http_is_refused_in_words(served: Served) -> None:
    for pieces in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 300,  # TLS
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"GET / HTTP/1.1\r\na\0b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\0c\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        refused = await answer(served, pieces)
        assert refused.status == 400 and refused.error["type"] == "invalid_request_error", pieces[:60]


async def a_request_names_exactly_one_host_since_http_1_1(served: Served) -> None:
    """Two readers of one request must not disagree about its host."""
    for head in (
        b"GET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nhost: y\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4000\r\n",
    ):
        refused = await answer(served, head + b"\r\n" + ASKED + MODELS)
        assert refused.status == 400 and "Host" in refused.error["message"], head
    assert (await answer(served, b"GET /health HTTP/1.0\r\n\r\n")).status == 200
    received = await answers(served, MODELS + b"GET /health HTTP/1.1\r\n\r\n" + MODELS)
    assert 400 in [answer.status for answer in received] and len(received) <= 2


async def a_length_that_is_not_the_bodys_costs_that_connection_alone(served: Served) -> None:
    short = await answer(served, HEAD + b"content-length: 3\r\n\r\n" + ASKED)  # the rest begins no request
    assert short.status == 400 and short.error
    assert (await answer(served, HEAD + b"content-length: 500\r\n\r\n" + ASKED)).status == 408


async def who_is_refused_before_its_body_was_there_hears_of_it(served: Served) -> None:
    long = b"content-length: 90000\r\n\r\n" + b" " * 80_000
    assert (await answer(served, HEAD.replace(KEY.encode(), b"wrong") + long)).status == 401
    expecting = HEAD + b"expect: 100-continue\r\n" + b"content-length: %d\r\n\r\n" % (2 * MAX_BODY)
    assert (await answer(served, expecting)).status == 413


def sent_first(served: Served, request: bytes, nbytes: int) -> bytes:
    """What a client hears that listens when it has sent all, as many do."""
    with socket.create_connection(("127.0.0.1", served.port), WITHIN) as plain:
        plain.sendall(request)
        for _ in range(nbytes >> 16):
            plain.sendall(b" " * 65536)
        return b"".join(iter(lambda: plain.recv(65536), b""))


async def who_is_refused_and_wants_an_end_hears_of_it_first(served: Served) -> None:
    nbytes = 80 * MAX_BODY
    length = b"content-length: %d\r\n\r\n" % nbytes
    for head, status in (
        (closing(HEAD), 413),
        (closing(HEAD).replace(KEY.encode(), b"wrong"), 401),
        (closing(HEAD).replace(b"/v1/completions", b"/v1/nothing"), 404),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"), 413),
    ):
        response = await asyncio.to_thread(sent_first, served, head + length, nbytes)
        assert b" %d " % status in response.partition(b"\r\n")[0] and b"connection: close" in response, head
        assert response.endswith(b"}") and response.count(b"HTTP/1.1") == 1


async def nobody_is_listened_to_for_long_after_a_refusal(served: Served) -> None:
    head = closing(HEAD).replace(KEY.encode(), b"wrong") + b"content-length: 100000000000\r\n\r\n"

    def flood() -> None:
        with pytest.raises(ConnectionError):
            sent_first(served, head, 4 * MAX_THROWN_NBYTES)

    def drip() -> None:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", served.port), WITHIN) as plain:
            plain.sendall(head)
            with pytest.raises(ConnectionError):
                while time.monotonic() - began < WITHIN:
                    time.sleep(0.05)
                    plain.sendall(b" ")

    await asyncio.gather(asyncio.to_thread(flood), asyncio.to_thread(drip))


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def bodies_that_make_no_sense_are_refused(served: Served) -> None:
    deep = 40_000
    for body in (
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800 x"}',
        b'{"prompt": "x", "user": "\\ud800\\u0041"}',
        b'{"prompt": "a\0b"}',
        b'{"prompt": "x"}{"prompt": "y"}',
        b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}",
        b'{"prompt": "x", "unknown": ' + b"[" * deep + b"]" * deep + b"}",
        b'{"prompt": "x", "unknown": ' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "temperature": -1e-999, "top_p": 2}',
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 50_000 + b"}",
        b'{"prompt": "x", "seed": 18446744073709551616}',
        b'{"prompt": "x", "best_of": 100000000000000000000000000000}',
        b'{"prompt": "x", "n": 1000000}',
        b'{"prompt": "x", "n": 1, "n": 1000000}',
        json.dumps({"prompt": ["x"] * 129}).encode(),
        json.dumps({"prompt": [[1]] * 129}).encode(),
        json.dumps({"prompt": "x", "stop": ["abc"] * 10_000}).encode(),
        json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(8_000)), 1)}).encode(),
        json.dumps({"prompt": "x", "allowed_token_ids": list(range(15_000))}).encode(),
        json.dumps({"prompt": "x", "allowed_token_ids": [5_000]}).encode(),
        b'{"prompt": "x", "allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 2}',
        json.dumps({"prompt": "x", "logprobs": 21}).encode(),
    ):
        assert len(body) < MAX_BODY
        refused = await answer(served, closing(sized(body)))
        assert refused.status == 400 and refused.error, body[:80]


async def bodies_that_are_odd_and_make_sense_are_answered(served: Served) -> None:
    for body in (
        b'{"prompt": "wrong", "prompt": "a\\u0000b", "max_tokens": 3}',
        b' \r\n\t{"prompt":"a\\u0000b","max_tokens":3}\n ',
        b'{"prompt": "a\\u0000b", "max_tokens": 3, "unknown": {"a": [1e300, "\\ud83d\\ude00"]}, "a": 1, "a": 2}',
        b'{"prompt": "a\\u0000b", "max_tokens": 3, "unknown": ' + b"[" * 200 + b"]" * 200 + b"}",
    ):
        done = await answer(served, closing(sized(body)))
        assert json.loads(done.body)["choices"][0]["text"] == served.answer("a\0b", 3), body[:80]


SCENES: tuple[Callable[[Served], Any], ...] = (
    who_says_nothing_or_half_a_head_is_told_that_it_is_too_late,
    a_head_or_a_body_that_drips_wins_no_time,
    a_body_may_take_longer_than_the_patience_if_it_comes,
    what_has_no_end_is_cut_off,
    requests_without_end_behind_one_that_is_answered_end_the_connection,
    pipelined_requests_are_answered_in_their_order,
    a_client_that_goes_takes_all_its_requests_with_it,
    methods_that_a_route_has_not_are_named_with_those_it_has,
    a_path_without_a_route_is_answered_with_the_nearest,
    an_answer_has_the_id_of_its_request,
    what_is_no_http_is_refused_in_words,
    a_request_names_exactly_one_host_since_http_1_1,
    a_length_that_is_not_the_bodys_costs_that_connection_alone,
    who_is_refused_before_its_body_was_there_hears_of_it,
    who_is_refused_and_wants_an_end_hears_of_it_first,
    nobody_is_listened_to_for_long_after_a_refusal,
    bodies_that_make_no_sense_are_refused,
    bodies_that_are_odd_and_make_sense_are_answered,
    as_many_as_may_be_connected_are_and_the_others_are_told,
)


@in_a_loop
async def test_pages_of_origins_that_are_allowed_may_ask_and_no_others() -> None:
    def preflight(origin: str, method: str = "GET") -> bytes:
        head = f"{method} /v1/models HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\n"
        more = "access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n"
        return closing(f"{head}{more if method == 'OPTIONS' else AUTHORIZED}\r\n".encode())

    async with run_server({"allowed_origins": ("https://a.example",)}, api_server_count=1) as served:
        for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
            for method in ("GET", "OPTIONS"):
                response = await answer(served, preflight(origin, method))
                allowed = response.headers.get("access-control-allow-origin")
                assert allowed == (origin if is_allowed else None), (origin, method)
                assert response.status == (200 if is_allowed or method == "GET" else 400)
                assert response.headers["x-request-id"]
        exposed = (await answer(served, preflight("https://a.example"))).headers["access-control-expose-headers"]
        assert "x-request-id" in exposed
    async with run_server(api_server_count=1) as served:
        assert (await answer(served, preflight("https://a.example", "OPTIONS"))).status == 405
        assert "access-control-allow-origin" not in (await answer(served, preflight("https://a.example"))).headers


# ── on one server; last, as its server lives until the module ends ────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def shared(warmed_up: None) -> Iterator[SharedServer]:
    with shared_server(run_server()) as shared:
        yield shared


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_served_tree(shared: SharedServer, scene: Scene) -> None:
    """And then it answers as before, with the same processes, holds nothing, and was never at fault."""
    servers = {child.pid for child in shared.served.children() if child.member.kind == "server"}

    async def is_as_before(served: Served) -> None:
        done = await served.client.completions.create(model="simulated", prompt="hello", max_tokens=3)
        assert done.choices[0].text == served.answer("hello", 3)
        await served.must_be_empty()
        assert await served.total("penstock_open_requests") == 0
        assert await served.total("penstock_requests_total", 'status="500"') == 0
        assert servers == {child.pid for child in served.children() if child.member.kind == "server"}

    shared.play(scene, is_as_before)
