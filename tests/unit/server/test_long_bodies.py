"""Long requests are read by threads: while one is, the loop goes on; and a client that goes leaves nothing."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("starlette")

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.server.chat.prompt_builder import MANY, NumberTokenizer, PromptBuilder
from penstock.server.chat.request_schema import decoded
from penstock.server.chat.streaming import CLIENT_CONNECTION
from penstock.server.http import app, endpoint
from penstock.server.http.app import ApiServer
from penstock.server.http.endpoint import LONG
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, ServerCounters
from tests.support.loops import in_a_loop

CONFIG = EngineConfig(simulated=SimulatedDevice(vocabulary=200), max_model_len=1 << 20)
WORDS = [{"role": "user", "content": "hello"}]


class Turn:
    """Work that is done when the loop has had a turn, and says where it is done."""

    def __init__(self) -> None:
        self.loop_goes_on = threading.Event()
        self.began = threading.Event()
        self.threads: list[str] = []

    def wait(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.loop_goes_on.wait(10), "the loop was held up"


class Words(NumberTokenizer):
    turn: Turn | None = None
    encoded = 0  # texts

    def encode(self, text: str, add_special: bool) -> list[int]:
        self.encoded += 1
        return super().encode(text, add_special)

    def chat(self, *arguments: Any) -> str:
        if self.turn is not None:
            self.turn.wait()
        return super().chat(*arguments)


class Exchange:
    """An Api without an engine, and one client of it."""

    def __init__(self, api: ApiServer, row: ProcessCounters, words: Words) -> None:
        self.api, self.row, self.words = api, row, words
        self.app = api.app()
        self.watcher: Callable[[], None] | None = None
        self.messages: list[Any] = []

    async def ask(self, body: dict[str, Any], path: str = "/tokenize") -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            self.messages.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        scope["extensions"] = {CLIENT_CONNECTION: self}
        await self.app(scope, receive, send)

    def on_disconnect(self, call: Callable[[], None] | None) -> Callable[[], None] | None:
        before, self.watcher = self.watcher, call
        return before

    def go(self) -> None:
        assert self.watcher is not None
        self.watcher()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])


@contextlib.asynccontextmanager
async def open_exchange() -> AsyncIterator[Exchange]:
    segments = ServerCounters.create(1), StatusBoard.create(1)
    tally = ServerCounters(segments[0], 1, writable=True)
    words = Words(200)
    nobody: Any = None
    with contextlib.closing(PromptBuilder(CONFIG, words)) as reader:
        yield Exchange(
            ApiServer(CONFIG, ServerOptions(), nobody, reader, tally, StatusBoard(segments[1]), 0), tally.rows[0], words
        )


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    result = Turn()

    def slowly(*values: Any) -> Any:
        result.wait()
        return decoded(*values)

    monkeypatch.setattr(endpoint, "decoded", slowly)
    return result


@in_a_loop
async def test_while_a_long_body_is_decoded_the_loop_goes_on(turn: Turn) -> None:
    async with open_exchange() as exchange:
        asyncio.get_running_loop().call_later(0.01, turn.loop_goes_on.set)
        await exchange.ask({"messages": [{"role": "user", "content": "x" * LONG}]})
        assert exchange.status == 200 and turn.threads != [threading.current_thread().name]


@in_a_loop
async def test_while_many_messages_become_a_prompt_the_loop_goes_on() -> None:
    async with open_exchange() as exchange:
        exchange.words.turn = Turn()
        asyncio.get_running_loop().call_later(0.01, exchange.words.turn.loop_goes_on.set)
        await exchange.ask({"messages": WORDS * (MANY + 1)})
        assert exchange.status == 200
        parts = [{"type": "text", "text": "a"}] * (MANY + 1)
        exchange.words.turn = Turn()
        asyncio.get_running_loop().call_later(0.01, exchange.words.turn.loop_goes_on.set)
        await exchange.ask({"messages": [{"role": "user", "content": parts}]})


@in_a_loop
async def test_between_two_of_many_prompts_the_loop_goes_on() -> None:
    async with open_exchange() as exchange:
        observed = set()

        async def look() -> None:
            while True:
                observed.add(exchange.words.encoded)
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        await exchange.ask({"prompt": ["a", "b", "c", "d", ""]}, "/v1/completions")  # there is no engine for others
        looking.cancel()
        assert exchange.status == 400 and observed >= {1, 2, 3, 4}


class Answering:
    async def submit(self, *arguments: Any, **more: Any) -> Any:
        return contextlib.AsyncExitStack()  # what is opened and closed as a stream is


@in_a_loop
async def test_between_two_of_many_samples_that_are_told_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gathered(*values: Any) -> list[int]:
        return [1, 2, 3, 4]

    output: list[int] = []

    def tell(choice: int, *arguments: Any) -> dict[str, int]:
        output.append(choice)
        return {"index": choice}

    monkeypatch.setattr(app, "collect", gathered)
    monkeypatch.setattr(app, "usage_of", lambda *streams: {})
    monkeypatch.setattr(app, "LatencyRecorder", mock.Mock())
    monkeypatch.setattr(app, "StreamedChoice", mock.Mock(of_completion=tell))
    async with open_exchange() as exchange:
        exchange.api._client = Answering()  # type: ignore[assignment]
        observed = set()

        async def look() -> None:
            while True:
                observed.add(len(output))
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        await exchange.ask({"prompt": "a", "n": 4}, "/v1/completions")
        looking.cancel()
        assert exchange.status == 200
        choices = json.loads(exchange.messages[1]["body"])["choices"]
        assert choices == [{"index": choice} for choice in (1, 2, 3, 4)]
        assert observed >= {1, 2, 3}


@in_a_loop
async def test_a_short_request_costs_no_thread(turn: Turn) -> None:
    async with open_exchange() as exchange:
        exchange.words.turn = turn
        turn.loop_goes_on.set()
        await exchange.ask({"messages": WORDS})
        assert exchange.status == 200 and turn.threads == [threading.current_thread().name] * 2


@in_a_loop
async def test_a_client_that_goes_while_its_body_is_decoded_leaves_nothing(turn: Turn) -> None:
    async with open_exchange() as exchange:
        asking = asyncio.ensure_future(exchange.ask({"messages": [{"role": "user", "content": "x" * LONG}]}))
        await asyncio.to_thread(turn.began.wait, 10)
        assert exchange.row[ProcessCounters.OPEN] == 1 and exchange.api._bodies.reading_nbytes > LONG
        exchange.go()
        await asyncio.wait_for(asking, 5)  # and not when the decoder has come to its end
        assert exchange.messages == [] and exchange.row[ProcessCounters.OPEN] == 0
        assert exchange.api._bodies.reading_nbytes == 0
        turn.loop_goes_on.set()


@in_a_loop
async def test_error_in_a_long_body_names_the_path_of_the_field() -> None:
    async with open_exchange() as exchange:
        await exchange.ask({"messages": [{"role": "nobody", "content": "x" * LONG}]})
        assert exchange.status == 400 and b"$.messages[0].role" in exchange.messages[1]["body"]
