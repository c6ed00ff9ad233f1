"""Load on a server with known answers: clients that read, leave in the middle, or do not read.

Whatever text a client gets is right, as far as it goes, or the load fails. An answer that ended well is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.test_server import AUTHORIZED, Served
from tests.support.engine import SHAPE as OF_A_GROUP
from tests.support.engine import START

ANSWERED_WITHIN = 20.0  # seconds; a request ends by then, in whatever way
ENDED = (OSError, asyncio.IncompleteReadError)  # the connection has
PAUSE = 0.05  # seconds, after a request that was refused
SHAPE = {"api_server_count": 2, "data_parallel_size": 2, **OF_A_GROUP}
LIMITS = {"max_open_requests": 64, "client_timeout": 5.0}


@dataclass
class Asked:
    """One request, and what became of it."""

    kind: str
    began: float
    ended: float = 0.0
    error: str = ""  # empty: it was answered, and rightly


@dataclass
class Question:
    """And its whole answer."""

    prompt: str
    tokens: int
    answer: str


class Load:
    def __init__(
        self,
        served: Served,
        seed: int,
        question: Callable[[random.Random], Question] | None = None,
        within: float = ANSWERED_WITHIN,
    ) -> None:
        self.served = served
        self.chance = random.Random(seed)
        self.requests: list[Asked] = []
        self.gone: Counter[str] = Counter()  # clients of which no answer was expected
        self.is_over = False
        self._question = question or self._of_the_rule
        self._within = within

    def _of_the_rule(self, chance: random.Random) -> Question:
        prompt = "".join(chance.choices("abcdefgh ", k=chance.randrange(1, 60)))
        tokens = chance.randrange(1, 80)
        return Question(prompt, tokens, self.served.answer(prompt, tokens))

    @contextlib.asynccontextmanager
    async def running(self, askers: int = 6) -> Any:
        """Raises what went wrong in any of them."""
        tasks = [self.ask(kind) for kind in ("whole", "stream") for _ in range(askers // 2)]
        all_of_them = asyncio.gather(*tasks, self.vanish(), self.ignore())
        try:
            yield all_of_them
            self.is_over = True
            await asyncio.wait_for(all_of_them, 2 * self._within)
        finally:
            self.is_over = True
            all_of_them.cancel()
            await asyncio.gather(all_of_them, return_exceptions=True)

    # ── clients that read ──
    async def ask(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_over:
            request = Asked(kind, loop.time())
            question = self._question(self.chance)
            request.error = await asyncio.wait_for(self._fate(question, kind == "stream"), self._within)
            request.ended = loop.time()
            self.requests.append(request)
            if request.error:
                await asyncio.sleep(PAUSE)

    async def _fate(self, question: Question, is_streamed: bool) -> str:
        """Empty: the answer came, as a whole. Raises AssertionError for a wrong one."""
        try:
            reader, writer = await self._connect(question.prompt, question.tokens, is_streamed)
        except ENDED as error:
            return f"not connected: {error!r}"
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if status != 200:
                body = await reader.read()
                if not body.endswith(b"}}"):
                    return "cut off"
                answer = json.loads(body)
                assert status in (429, 500, 503, 504) and answer["error"]["message"], (status, answer)
                assert status != 500, answer
                return f"status {status}"
            if is_streamed:
                return await self._events(reader, question.answer)
            body = await reader.read()
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            if len(body) < int(length.split()[1]):
                return "cut off"
            assert json.loads(body)["choices"][0]["text"] == question.answer, question
            return ""
        except ENDED as error:
            return f"cut off: {error!r}"
        finally:
            writer.transport.abort()

    async def _events(self, reader: asyncio.StreamReader, answer: str) -> str:
        text = ""
        while True:
            line = await reader.readline()
            if not line.endswith(b"\n"):
                return "cut off"
            if line == b"data: [DONE]\n":
                assert text == answer, f"{text!r} for {answer!r}"
                return ""
            if not line.startswith(b"data: "):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"told: {chunk['error']['message']}"
            text += chunk["choices"][0]["text"]
            assert answer.startswith(text), f"{text!r} for {answer!r}"

    async def _connect(
        self, prompt: str, tokens: int, is_streamed: bool, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = {"prompt": prompt, "max_tokens": tokens, "stream": is_streamed, "temperature": 0, "ignore_eos": True}
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORIZED}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.served.port, **options)
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        return reader, writer

    # ── clients that do not read ──
    async def vanish(self) -> None:
        """Goes after it has read something, or before."""
        while not self.is_over:
            await asyncio.sleep(self.chance.uniform(0, 0.1))
            question = self._question(self.chance)
            with contextlib.suppress(*ENDED, asyncio.TimeoutError):
                reader, writer = await self._connect(question.prompt, 150, self.chance.random() < 0.7)
                try:
                    if self.chance.random() < 0.7:
                        await asyncio.wait_for(reader.read(self.chance.randrange(1, 4000)), 2.0)
                finally:
                    writer.transport.abort()
                self.gone["vanished"] += 1

    async def ignore(self) -> None:
        """Reads nothing of a long answer, for a while."""
        while not self.is_over:
            with contextlib.suppress(*ENDED), socket.socket() as listless:
                listless.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                listless.setblocking(False)
                loop = asyncio.get_running_loop()
                await asyncio.wait_for(loop.sock_connect(listless, ("127.0.0.1", self.served.port)), self._within)
                question = self._question(self.chance)
                payload = json.dumps({"prompt": question.prompt, "max_tokens": 150, "n": 4, "stream": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{AUTHORIZED}content-length: {len(payload)}\r\n\r\n"
                await loop.sock_sendall(listless, head.encode() + payload)
                await asyncio.sleep(self.chance.uniform(0.2, 2.0))
                self.gone["did not read"] += 1


async def must_be_as_before(served: Served, within: float = START, *, is_keeping: bool = False) -> None:
    """All groups and servers serve; nothing is open, all memory is there, but what a store that `is_keeping` has under
    keys, held by none."""
    await served.launcher.serving(within)
    config = served.config
    everybody = config.api_server_count + config.data_parallel_size * _of_a_group(served)
    await served.until(lambda: len(served.children()) == everybody, within)
    for _ in range(4 * config.api_server_count):
        assert (await served.get("/v1/models"))[0] == 200
    for group in range(config.data_parallel_size):
        await served.must_be_empty(group)
    await until_told(served, "penstock_open_requests", 0)
    store = served.launcher.cluster.store
    if store is not None and is_keeping:
        await served.until(lambda: not any(item.holders for item in store.stats().items))
        assert store.stats().pool.blocks == len(store.stats().items)
    elif store is not None:
        assert store.stats().pool.blocks == 0


def _of_a_group(served: Served) -> int:
    return 1 + served.config.tensor_parallel_size + served.config.output_processors


async def until_told(served: Served, metric: str, number: float, within: float = 20.0) -> None:
    deadline = asyncio.get_running_loop().time() + within
    while (figure := await served.total(metric)) != number:
        assert asyncio.get_running_loop().time() < deadline, f"{metric} is {figure}"
        await asyncio.sleep(0.05)
