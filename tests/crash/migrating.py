"""Requests of every kind, over HTTP and over `Client`, whose answers are compared between an undisturbed run and one in
which processes are killed.

`Mix` makes the requests, `ask_all` asks them at once, `Strikes` kills processes meanwhile, and `differences` compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.process import ChildProcess
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import FinishReason, Logprobs
from penstock.engine.protocol.sampling_params import SamplingParams
from penstock.server.chat.streaming import likely
from penstock.server.options import ServerOptions
from penstock.server.server_launcher import ServerLauncher
from penstock.server.server_process import listen
from tests.e2e.test_server import AUTHORIZED, KEY, Served
from tests.support.engine import START, told
from tests.support.serving import until_told

LOGPROB_TOLERANCE = 1e-4
SHOWN, SHOWN_CHARACTERS = 5, 400  # of answers that differ, and of each difference
ANSWERED_WITHIN = 240.0  # seconds: restarts on a busy machine included
IN_PROCESS = 1  # index of the server whose place the test's own client takes
GROUP_KINDS = ("worker", "core", "output")


# ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Migrating(Served):
    """A tree with one server process, and a client in this process in the place of a second one."""

    engine_client: Client

    async def must_be_whole(self, within: float = START) -> None:
        """All groups serve, nothing is open, waits or is held, and all blocks are free."""
        await self.launcher.serving(within)
        assert self.engine_client.open_requests == 0
        await until_told(self, "penstock_open_requests", 0)
        for group in range(self.config.data_parallel_size):
            row = self.launcher.board.row(group)
            await self.until(lambda row=row: row[StatusBoard.OPEN] == 0)
            await self.until(lambda row=row: row[StatusBoard.FREE_BLOCKS] == row[StatusBoard.BLOCKS])
        store = self.launcher.tree.store
        if store is not None:
            await self.until(lambda: not any(item.holders for item in store.stats().items))
            await self.until(lambda: store.stats().pool.blocks == len(store.stats().items))

    def serving(self, group: int) -> int:
        """Returns the incarnation that serves; 0: none does."""
        return self.number(StatusBoard.SERVING, group)


@contextlib.asynccontextmanager
async def migrating(
    server: dict[str, Any] | None = None,
    start: float = START,
    prepare: Callable[[ServerLauncher], None] | None = None,
    drain: float = 0.0,
    **options: Any,
) -> AsyncIterator[Migrating]:
    """`server`: options of the server; `prepare`: what is changed of the launcher before it starts; `drain`: seconds
    for open requests at the end."""
    usual = {"api_keys": (KEY,), "max_open_requests": 512, "client_timeout": 5.0}
    server_options = ServerOptions(port=0, **{**usual, **(server or {})})
    config = EngineConfig(**{"simulated": told(), "max_model_len": 2048, "api_server_count": 2, **options})
    with contextlib.closing(listen(server_options)) as listener:
        port = listener.getsockname()[1]
        launcher = ServerLauncher(config, server_options, listener)
        launcher._servers = launcher._servers[:IN_PROCESS]
        launcher.units = tuple(unit for unit in launcher.units if unit.is_group or unit in launcher._servers)
        if prepare is not None:
            prepare(launcher)
        try:
            launcher.start()
            await launcher.serving(start)
            tree = Migrating(launcher, port)
            async with tree.client, Client(launcher.tree, IN_PROCESS) as tree.engine_client:
                yield tree
        finally:
            late = await launcher.stop(drain)
        assert not late, f"had to be killed: {late}"


# ── requests and answers ─────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Choice:
    """What is delivered of one sample. `logprobs`: numbers that are compared with a tolerance."""

    text: str = ""
    ids: list[int] = field(default_factory=list)  # only a `Client` shows them
    reason: str | None = None
    stop: int | str | None = None
    events: list[Any] = field(default_factory=list)  # of a stream: without id and created, and without logprobs
    logprobs: list[float] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)  # of its log-probabilities: ids or texts, and ranks


@dataclass
class Answer:
    status: int = 200
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""  # of a stream with one choice and no log-probabilities: its bytes without id and created
    heads: set[tuple[str, int]] = field(default_factory=set)  # id and created, of all events of a stream
    first_at: float = 0.0  # when something of the answer was delivered
    ended_at: float = 0.0

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


class Progress:
    """Counts what has been delivered, so that a strike can come after a share of it."""

    def __init__(self) -> None:
        self.deliveries = 0

    def add(self, answer: Answer) -> None:
        self.deliveries += 1
        if not answer.first_at:
            answer.first_at = time.monotonic()


@dataclass
class HttpRequest:
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def __str__(self) -> str:
        shown = {name: value for name, value in self.body.items() if name not in ("prompt", "messages")}
        return f"POST {self.path} {shown}"

    async def ask(self, tree: Migrating, salt: str, progress: Progress) -> Answer:
        answer = Answer()
        reader, writer = await asyncio.open_connection("127.0.0.1", tree.port)
        try:
            body = json.dumps({**self.body, "cache_salt": salt} if salt else self.body).encode()
            head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORIZED}"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            received = await reader.readuntil(b"\r\n\r\n")
            answer.status = int(received.split()[1])
            is_chunked = b"transfer-encoding: chunked" in received.lower()
            pieces = []
            async for piece in _chunks(reader) if is_chunked else _whole(reader):
                progress.add(answer)
                pieces.append(piece)
            data = b"".join(pieces)
            if answer.status != 200:
                answer.error = data.decode(errors="replace")
            elif self.is_streamed:
                self._read_events(answer, data)
            else:
                self._read_whole(answer, json.loads(data, parse_float=_Float))
        except (OSError, asyncio.IncompleteReadError) as error:
            answer.error = f"cut off: {error!r}"
        finally:
            writer.transport.abort()
        answer.ended_at = time.monotonic()
        return answer

    def _read_whole(self, answer: Answer, said: dict[str, Any]) -> None:
        answer.usage = said["usage"]
        for given in said["choices"]:
            choice = answer.choice(given["index"])
            choice.text = given["text"] if "text" in given else given["message"]["content"]
            choice.reason, choice.stop = given["finish_reason"], given["stop_reason"]
            choice.tokens = _without_floats(given["logprobs"], choice.logprobs)

    def _read_events(self, answer: Answer, data: bytes) -> None:
        if not data.endswith(b"data: [DONE]\n\n"):
            answer.error = f"the stream ends with {data[-300:]!r}"
            return
        lines = data.split(b"\n\n")
        for line in lines[:-2]:  # [DONE], and nothing behind it
            if not line.startswith(b"data: {"):
                answer.error = f"not an event: {line!r}"
                return
            said = json.loads(line[6:], parse_float=_Float)
            if "error" in said:
                answer.error = said["error"]["message"]
                return
            answer.heads.add((said.pop("id"), said.pop("created")))
            if not said["choices"]:
                answer.usage = said["usage"]
                continue
            (given,) = said["choices"]
            choice = answer.choice(given["index"])
            choice.text += given["text"] if "text" in given else given["delta"].get("content", "")
            choice.reason = given["finish_reason"] or choice.reason
            choice.events.append(_without_floats(said, choice.logprobs))
        if len(answer.choices) == 1 and not self.body.get("logprobs"):
            answer.raw = b"\n\n".join(_HEAD.sub(b"", line, count=2) for line in lines if b'"choices":[]' not in line)


_HEAD = re.compile(rb'"id":"[^"]*",|"created":\d+,')


class _Float(float):
    """A number that JSON writes with a point: of log-probabilities only."""


def _without_floats(value: Any, floats: list[float]) -> Any:
    """Returns the value with None in place of each float, and appends the floats in order."""
    if isinstance(value, _Float):
        floats.append(float(value))
        return None
    if isinstance(value, dict):
        return {name: _without_floats(item, floats) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_floats(item, floats) for item in value]
    return value


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    yield await reader.read()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while nbytes := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(nbytes + 2))[:-2]
    await reader.readexactly(2)


@dataclass
class ClientRequest:
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    images: tuple[Any, ...] = ()

    is_streamed = True

    def __str__(self) -> str:
        params = {
            name: value
            for name, value in msgspec.structs.asdict(self.params).items()
            if value != getattr(SamplingParams(), name)
        }
        return f"Client, prompt of {len(self.prompt)}, {len(self.images)} images, {params}"

    async def ask(self, tree: Migrating, salt: str, progress: Progress) -> Answer:
        answer = Answer()
        try:
            stream = await tree.engine_client.submit(
                self.prompt, self.params, values=self.images, priority=self.priority, salt=salt.encode()
            )
            async with stream:
                async for piece in stream:
                    progress.add(answer)
                    choice = answer.choice(piece.sample)
                    assert choice.reason is None, "a chunk after the end of its sample"
                    choice.ids += piece.ids
                    choice.text += piece.utf8.decode(errors="surrogateescape")
                    choice.stop = piece.stop
                    choice.reason = None if piece.reason is None else FinishReason(piece.reason).name
                    if piece.logprobs is not None and self.params.logprobs is not None:
                        _keep_logprobs(choice, piece.logprobs)
        except EngineError as error:
            answer.status, answer.error = error.status, error.reason
        else:
            answer.usage = {
                "prompt_tokens": stream.prompt_tokens,
                "completion_tokens": stream.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
            }
            assert stream.completion_tokens == sum(len(choice.ids) for choice in answer.choices.values())
        answer.ended_at = time.monotonic()
        return answer


def _keep_logprobs(choice: Choice, logprobs: Logprobs) -> None:
    choice.tokens += [[token_id for token_id, _ in row] for row in likely(logprobs)]
    choice.tokens += logprobs.ranks.tolist()
    choice.logprobs += [value for row in likely(logprobs) for _, value in row]


AnyRequest = HttpRequest | ClientRequest


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────
def differences(undisturbed: Answer, disturbed: Answer) -> list[str]:
    """Returns what differs, in words; nothing if all that a client may rely on is equal."""
    if disturbed.error or undisturbed.error:
        return [f"status {disturbed.status}: {disturbed.error or 'answered'}; undisturbed: {undisturbed.error}"]
    found = []
    if len(disturbed.heads) > 1:
        found.append(f"id and created are not constant: {disturbed.heads}")
    if set(disturbed.choices) != set(undisturbed.choices):
        return [*found, f"choices {set(disturbed.choices)} for {set(undisturbed.choices)}"]
    for index, want in undisturbed.choices.items():
        got = disturbed.choices[index]
        for name in ("ids", "text", "reason", "stop", "tokens", "events"):
            found += _difference(f"choice {index}: {name}", getattr(want, name), getattr(got, name))
        if len(got.logprobs) != len(want.logprobs):
            found.append(f"choice {index}: {len(got.logprobs)} log-probabilities for {len(want.logprobs)}")
        elif want.logprobs and (worst := float(np.abs(np.subtract(got.logprobs, want.logprobs)).max())) > (
            LOGPROB_TOLERANCE
        ):
            found.append(f"choice {index}: log-probabilities differ by {worst:g}")
    found += _difference("bytes", undisturbed.raw, disturbed.raw)
    (want_usage, want_cached), (got_usage, got_cached) = (_usage(each) for each in (undisturbed, disturbed))
    found += _difference("usage", want_usage, got_usage)
    if not 0 <= got_cached <= got_usage["prompt_tokens"]:
        found.append(f"cached_tokens are {got_cached}, undisturbed {want_cached}, of {got_usage['prompt_tokens']}")
    return found


def _usage(answer: Answer) -> tuple[dict[str, Any], int]:
    usage = dict(answer.usage)
    return usage, usage.pop("prompt_tokens_details")["cached_tokens"]


def _difference(name: str, want: Any, got: Any) -> list[str]:
    if want == got:
        return []
    if not isinstance(want, (str, bytes, list)):
        return [f"{name}: {got!r} for {want!r}"]
    at = next((at for at, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), -1)
    at = min(len(want), len(got)) if at < 0 else at
    around = slice(max(0, at - 3), at + 6)
    return [f"{name}: differs at {at} of {len(want)} ({len(got)} came): {got[around]!r} for {want[around]!r}"]


def require_equal(requests: Sequence[AnyRequest], undisturbed: Sequence[Answer], disturbed: Sequence[Answer]) -> None:
    """Fails with what differs, of the first requests of which something does."""
    wrong = [
        f"{request}\n    " + "\n    ".join(line[:SHOWN_CHARACTERS] for line in found)
        for request, want, got in zip(requests, undisturbed, disturbed, strict=True)
        if (found := differences(want, got))
    ]
    assert not wrong, f"{len(wrong)} of {len(requests)} answers differ:\n" + "\n".join(wrong[:SHOWN])


async def ask_all(tree: Migrating, requests: Sequence[AnyRequest], salt: str, progress: Progress) -> list[Answer]:
    answers = asyncio.gather(*(request.ask(tree, salt, progress) for request in requests))
    return list(await asyncio.wait_for(answers, ANSWERED_WITHIN))


# ── the mix ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Shape:
    """What the tree's model has: ids below `vocabulary`, `ends` that may end an answer, and `tokens` of an answer."""

    model: str
    vocabulary: int
    ends: tuple[int, ...]
    tokens: tuple[int, int] = (60, 200)
    has_logprobs: bool = False
    has_images: bool = False


FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.3},
    {"stop": True},
    {"n": 3, "temperature": 1.0, "ends": True},
    {"logprobs": 3, "temperature": 0.9},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.0},
    {"ends": True, "min_tokens": 30, "temperature": 1.1},
    {"repetition_penalty": 1.3},
    {"n": 2, "stop": True, "temperature": 1.2},
    {"stop": True, "include_stop_str_in_output": True, "temperature": 0.8, "logprobs": 1},
    {"prompts": 2, "n": 2, "temperature": 1.0},
    {"skip_special_tokens": False, "top_p": 0.9, "top_k": 40, "temperature": 1.5, "priority": 1},
    {"stop": True, "min_tokens": 40},
)
WAYS = ("stream", "client", "whole", "chat stream", "client", "chat whole")


class Mix:
    """Requests with every feature in every way, from a seed. Each has a prompt of its own."""

    def __init__(self, shape: Shape, seed: int, images: Sequence[str] = ()) -> None:
        """`images`: data URLs, for chats of a model that takes images."""
        self._shape = shape
        self._random = random.Random(seed)
        self._images = images
        self._number = 0

    async def requests(self, tree: Migrating, count: int) -> list[AnyRequest]:
        """Stop strings are pieces of the answers without them, so those are asked first."""
        made = [self._request() for _ in range(count)]
        with_stop = [(at, request) for at, (request, has_stop) in enumerate(made) if has_stop]
        answers = await ask_all(tree, [request for _, request in with_stop], "scout", Progress())
        requests = [request for request, _ in made]
        for (at, request), answer in zip(with_stop, answers, strict=True):
            requests[at] = self._with_stop(request, answer)
        self._random.shuffle(requests)
        return requests

    def _request(self) -> tuple[AnyRequest, bool]:
        features = dict(FEATURES[self._number % len(FEATURES)])
        way = WAYS[self._number % len(WAYS)] if self._number < len(WAYS) else self._random.choice(WAYS)
        self._number += 1
        has_stop = features.pop("stop", False)
        if features.pop("ends", False):
            features["stop_token_ids"] = list(self._shape.ends)
        if not self._shape.has_logprobs:
            features.pop("logprobs", None)
        features["max_tokens"] = self._random.randint(*self._shape.tokens)
        features["seed"] = self._random.getrandbits(40)
        features.setdefault("temperature", 0)
        if way == "client":
            return self._client_request(features), has_stop
        return self._http_request(way, features), has_stop

    def _client_request(self, features: dict[str, Any]) -> ClientRequest:
        features.pop("prompts", None)
        priority = features.pop("priority", 0)
        features["stop_token_ids"] = tuple(features.pop("stop_token_ids", ()))
        ids = [self._random.randrange(self._shape.vocabulary) for _ in range(self._random.randint(1, 60))]
        return ClientRequest(ids, SamplingParams(ignore_eos=not features["stop_token_ids"], **features), priority)

    def _http_request(self, way: str, features: dict[str, Any]) -> HttpRequest:
        texts = [self._text() for _ in range(features.pop("prompts", 1))]
        body: dict[str, Any] = {"model": self._shape.model, "ignore_eos": "stop_token_ids" not in features, **features}
        if "stream" in way:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if "chat" not in way:
            return HttpRequest("/v1/completions", {**body, "prompt": texts if len(texts) > 1 else texts[0]})
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        content: Any = " ".join(texts)
        if self._images:
            urls = self._random.sample(list(self._images), self._random.randint(1, min(2, len(self._images))))
            content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content.append({"type": "text", "text": " ".join(texts)})
        return HttpRequest("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]})

    def _text(self) -> str:
        return "".join(self._random.choices("abcdefghij  é", k=self._random.randint(1, 60)))

    def _with_stop(self, request: AnyRequest, answer: Answer) -> AnyRequest:
        """Adds a stop string that the answer has in its second half, and one that it does not have."""
        assert not answer.error, answer.error
        text = answer.choices[0].text
        text = text.encode(errors="surrogateescape").decode(errors="ignore")
        middle = self._random.randint(len(text) // 3, max(len(text) // 3, len(text) - 3))
        found = text[middle : middle + self._random.randint(2, 5)]
        stop = [one for one in (found, "nowhere in it") if one and "\ufffd" not in one]
        if isinstance(request, HttpRequest):
            return HttpRequest(request.path, {**request.body, "stop": stop})
        params = msgspec.structs.replace(request.params, stop=tuple(stop))
        return ClientRequest(request.prompt, params, request.priority, request.images)


# ── strikes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Strike:
    what: str
    at: float


class Strikes:
    """Kills processes of groups with SIGKILL: each after a random share of what an undisturbed run delivers."""

    def __init__(self, tree: Migrating, seed: int, progress: Progress, deliveries: int) -> None:
        self._tree = tree
        self._random = random.Random(seed)
        self._progress = progress
        self._deliveries = deliveries  # of the undisturbed run
        self.done: list[Strike] = []

    async def run(self, kinds: Sequence[str], *, at_once: float = 0.0) -> None:
        """Kills one process of each of these kinds, in this order. `at_once`: the share of strikes that wait for
        nothing, so that they may hit a group that is still starting."""
        shares = sorted(self._random.uniform(0.02, 0.8) for _ in kinds)
        for kind, share in zip(kinds, shares, strict=True):
            if self.done and self._random.random() < at_once:
                await asyncio.sleep(self._random.uniform(0.0, 0.5))
            else:
                while self._progress.deliveries < share * self._deliveries or not self._victims(kind):
                    await asyncio.sleep(0.002)
                await asyncio.sleep(self._random.uniform(0.0, 0.03))
            if victims := self._victims(kind, must_serve=False):
                self._kill(self._random.choice(victims))

    def _victims(self, kind: str, must_serve: bool = True) -> list[ChildProcess]:
        return [
            child
            for child in self._tree.children()
            if child.member.kind == kind and (not must_serve or self._tree.serving(child.member.group))
        ]

    def _kill(self, victim: ChildProcess) -> None:
        self.done.append(Strike(str(victim.member), time.monotonic()))
        victim.signal(signal.SIGKILL)


def shuffled_kinds(seed: int, kinds: Sequence[str] = GROUP_KINDS) -> Iterator[str]:
    """Yields kinds of processes without end, each as often as the others."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(list(kinds), len(kinds))


async def compare(
    tree: Migrating, requests: Sequence[AnyRequest], kinds: Sequence[str], seed: int, at_once: float = 0.0
) -> list[Strike]:
    """Asks all requests twice, with strikes the second time. Fails with the differences of each request."""
    progress = Progress()
    began = time.monotonic()
    undisturbed = await ask_all(tree, requests, f"undisturbed {seed}", progress)
    between = time.monotonic()
    errors = [
        f"{request}: {answer.error}" for request, answer in zip(requests, undisturbed, strict=True) if answer.error
    ]
    assert not errors, errors
    counted = Progress()
    strikes = Strikes(tree, seed, counted, progress.deliveries)
    striking = asyncio.ensure_future(strikes.run(kinds, at_once=at_once))
    try:
        disturbed = await ask_all(tree, requests, f"disturbed {seed}", counted)
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
    if striking.done() and not striking.cancelled():
        striking.result()
    print(
        f"{len(requests)} requests: {between - began:.1f} s undisturbed, {time.monotonic() - between:.1f} s with "
        f"{[strike.what for strike in strikes.done]}"
    )
    require_equal(requests, undisturbed, disturbed)
    assert strikes.done, "no process was killed before all requests were answered"
    return strikes.done
