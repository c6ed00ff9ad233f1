"""What is asked of a cluster, by a server's ends that do as little as can be done: 2 cores are to serve, not to ask.

It submits as the client does. What comes it stamps and counts by columns, and looks at closely only before the measured
time begins: then each request's ids are compared with the device's rule. `trees` makes the clusters.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.engine_cases.trees import Bench
from bench.harness.figures import Figures
from penstock import Timeout
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import ProcessId
from penstock.engine.protocol.columns import Input, columns_of_inputs
from penstock.engine.protocol.messages import Abort, ChunkFormat, Delta, Failed, Ints, SamplingParams, Style, Submit
from penstock.engine.worker.simulated_device import TokenRule
from penstock.tools.inspect.processes import process_of

PATIENCE = 60.0  # seconds; for any one message
REST = 0.2  # seconds without a message, after which none is on its way
SETTLED = 5  # tokens that each request has before it is measured
LEAST = 8  # steps that are measured, however long they take
PROMPT = 32  # tokens at least; one more each, up to a block more, so that blocks fall due in every step
BLOCK = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
HEAD = b'{"id":"chatcmpl-%016x","object":"chat.completion.chunk","created":1795300000,"model":"bench"'

Stamps = npt.NDArray[np.int64]
_numbers = itertools.count()


class Wrong(Exception):
    """A cluster did not do what it was asked."""


class Server:
    """A server's ends of one tree."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        cluster, name = bench.cluster, str(ProcessId("server", 0, 0, 1))
        simulated = cluster.config.simulated
        assert simulated is not None, "this benchmark has no other device"
        self.rule = TokenRule(simulated)
        self.vocabulary = simulated.vocabulary
        self.row = bench.board.row(0)
        self._deltas = cluster.servers[0].open_receiver(name=name)
        self._core = cluster.groups[0].inbox.open_sender(0, name=name)

    def close(self) -> None:
        for end in (self._deltas, self._core):
            end.close()

    def ask(
        self,
        number: int,
        prompt: Ints,
        style: Style | None = None,
        params: SamplingParams = PARAMS,
        items: tuple[Input, ...] = (),
    ) -> None:
        written = None if style is None else ChunkFormat(style, HEAD % number)
        submit = Submit(0, number, prompt, params, inputs=columns_of_inputs([items]), chunk_format=written)
        self._core.send(submit, PATIENCE)

    def abort(self, numbers: Ints) -> None:
        self._core.send(Abort(0, numbers), PATIENCE)

    def receive(self, timeout: float = PATIENCE) -> Delta:
        message: Delta | Failed = self._deltas.receive(timeout)
        if isinstance(message, Failed):
            raise Wrong(f"request {message.request} failed with {message.status}: {message.reason}")
        return message


@dataclass(frozen=True)
class Reading:
    """The board, and what processes have used, at one time."""

    at: float
    steps: int
    own: int
    busy: int
    idle: int
    load: float  # CPU seconds of this process
    core: float  # and of the core

    @classmethod
    def take(cls, server: Server) -> Reading:
        row = server.row
        own, steps = row[StatusBoard.OWN_NS], row[StatusBoard.STEPS]
        busy, idle = row[StatusBoard.BUSY_NS], row[StatusBoard.IDLE_NS]
        core = process_of(server.bench.pid("core"))
        if core is None:
            raise Wrong("its core has ended")
        return cls(time.monotonic(), steps, own, busy, idle, time.process_time(), core.cpu_seconds)


class Tally:
    """When each request's first and last answers came, and how many tokens came after the first."""

    def __init__(self, first: int, requests: int) -> None:
        self._first = first
        self.begins: Stamps = np.zeros(requests, np.int64)
        self.ends: Stamps = np.zeros(requests, np.int64)
        self.tokens: Stamps = np.zeros(requests, np.int64)
        self.nbytes = 0

    def add(self, delta: Delta) -> None:
        now = time.monotonic_ns()
        rows = delta.requests - self._first
        counts = 1 if delta.counts is None else delta.counts
        is_first = self.begins[rows] == 0
        self.tokens[rows] += np.where(is_first, 0, counts)
        self.begins[rows[is_first]] = now
        self.ends[rows] = now
        self.nbytes += len(delta.text)

    def per_token(self) -> Stamps:
        """Nanoseconds, of each request."""
        if not (self.tokens > 0).all():
            raise Wrong(f"{int((self.tokens == 0).sum())} requests got less than 2 tokens in the measured time")
        return (self.ends - self.begins) / self.tokens


def decode(server: Server, batch: int, style: Style | None, seconds: float, chance: np.random.Generator) -> Figures:
    """So many requests are asked at once, and when all decode, it is measured; then they are aborted."""
    first = next(_numbers) * (1 << 14) % (1 << 30)
    prompts = [
        chance.integers(0, server.vocabulary, PROMPT + each % BLOCK, np.int32, endpoint=False) for each in range(batch)
    ]
    for each, prompt in enumerate(prompts):
        server.ask(first + each, prompt, style)
    _settle(server, first, prompts)
    tally, before = Tally(first, batch), Reading.take(server)
    deadline = before.at + seconds
    answers = 0
    while answers < LEAST or time.monotonic() < deadline:
        tally.add(server.receive())
        answers += 1
    after = Reading.take(server)
    _end(server, first, batch)
    steps, wall = max(after.steps - before.steps, 1), after.at - before.at
    busy, idle = after.busy - before.busy, after.idle - before.idle
    per_token = tally.per_token() / 1e6
    return {
        "idle_share": idle / max(idle + busy, 1),
        "tpot_ms": float(np.median(per_token)),
        "tpot_most_ms": float(per_token.max()),
        "own_ms": (after.own - before.own) / steps / 1e6,
        "core_cpu_ms": (after.core - before.core) / steps * 1e3,
        "steps_per_s": steps / wall,
        "text_nbytes_per_token": tally.nbytes / max(int(tally.tokens.sum()), 1),
        "load_cores": (after.load - before.load) / wall,
    }


def _settle(server: Server, first: int, prompts: list[Ints]) -> None:
    """Until all decode. What they have said by then is what the rule says, or it raises Wrong."""
    actual: list[list[int]] = [[] for _ in prompts]
    behind = len(prompts)
    while behind:
        delta = server.receive()
        at = 0
        counts = [1] * delta.rows if delta.counts is None else delta.counts.tolist()
        ids = delta.ids.tolist()
        for number, count in zip(delta.requests.tolist(), counts, strict=True):
            own = actual[number - first]
            behind -= len(own) < SETTLED <= len(own) + count
            own += ids[at : at + count]
            at += count
    for each, (prompt, own) in enumerate(zip(prompts, actual, strict=True)):
        if own != server.rule.answer(prompt, len(own)):
            raise Wrong(f"request {each} of {len(prompts)} got other ids than the rule gives")


def _end(server: Server, first: int, batch: int) -> None:
    """Aborts all, and waits until none is open and what was on its way has come."""
    server.abort(np.arange(first, first + batch, dtype=np.int32))
    until(lambda: server.row[StatusBoard.OPEN] == 0)
    with contextlib.suppress(Timeout):
        while True:
            server.receive(REST)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Wrong(f"it has not come to rest within {PATIENCE:g} s")
        time.sleep(0.002)
