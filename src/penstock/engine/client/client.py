"""The client of the engine in an API server: submits requests, and passes each answer's chunks to its stream.

One task per process receives the chunks of all requests. `router` chooses the group of a request, and `stream` is what
the caller of `submit` reads. The caller tokenizes texts and processes images before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock import AsyncSender, ClosedError, DecodeError, PeerDied, PenstockError, WouldBlock
from penstock.engine.client.router import Router, traces
from penstock.engine.client.stream import EngineError, OutputStream, split_delta
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.protocol.columns import Input, columns_of_inputs
from penstock.engine.protocol.messages import (
    MAX_REQUESTS,
    Abort,
    ChunkFormat,
    Delta,
    Failed,
    FinishReason,
    Ints,
    SamplingParams,
    Submit,
)
from penstock.tensor import Scope

MAX_AT_ONCE = 64  # messages, before other tasks of the loop have their turn
SEND_TIMEOUT = 5.0  # seconds; for a core that takes no requests
LOOK_AGAIN = 0.1  # seconds; whether a group has ended in peace, or began anew while this process was stopped
FAILURES = {
    FinishReason.ABORT: (503, "the engine has aborted this request: the server read its chunks too slowly"),
    FinishReason.ERROR: (500, "the model's logits for this request are not finite"),
    FinishReason.MISSING: (
        503,
        "an image of this request was no longer in the store when a worker opened it: send the request again",
    ),
    FinishReason.MISFIT: (
        400,
        "an image of this request does not fit the model, or its placeholder has another number of tokens",
    ),
}


class ImageInput(NamedTuple):
    """A processed image of a prompt: the tensors that the model's image processor returns, and their placeholder."""

    value: Any  # a tree of tensors
    position: int  # of the first placeholder token
    length: int  # of the placeholder, in tokens
    key: bytes | None = None  # a hash of the image and of its processing: a value with a known key is not stored again


class Client:
    """Submits requests to the engine. Used as `async with Client(tree, member) as client`, in one event loop."""

    def __init__(self, tree: Cluster, member: ProcessId | int) -> None:
        """`member`: the server process that the client acts for; outside of the tree, the index of a server will do."""
        self._me = ProcessId("server", 0, member, 1) if isinstance(member, int) else member
        self._config = tree.config
        index, name = self._me.index, str(self._me)
        self._deltas = tree.servers[index].open_async_receiver(name=name)
        self._cores = [group.inbox.open_async_sender(index, name=name) for group in tree.groups]
        self._board = StatusBoard(tree.board)
        self._rows = self._board.rows
        self._router = Router()
        self._store = tree.store
        self._streams: dict[int, OutputStream] = {}
        self._open = [0] * len(tree.groups)  # open requests of this client, by group
        self._dead = [0] * len(tree.groups)  # the last incarnation of each group that is known to be dead
        self._next = secrets.randbelow(MAX_REQUESTS)  # random: a restarted server must not reuse its open numbers
        self._sending: set[asyncio.Task[None]] = set()
        self._receiving: asyncio.Task[None] | None = None
        self._receive_error = ""  # the failure that has ended the receiving task
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        self._receiving = asyncio.ensure_future(self._receive_answers())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Aborts open requests: their readers get an EngineError."""
        for stream in tuple(self._streams.values()):
            self._abort(stream)
            stream.fail(EngineError(503, "the client of the engine has been closed"))
        if self._sending:
            await asyncio.wait(self._sending, timeout=SEND_TIMEOUT)
        if self._watch is not None:
            self._watch.cancel()
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        for end in (self._deltas, *self._cores):
            end.close()
        self._board.close()

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    @property
    def serving_groups(self) -> dict[int, int]:
        """Returns the groups to which a request may be sent, each with its incarnation."""
        serving = [row[StatusBoard.SERVING] for row in self._rows]
        return {group: serving[group] for group, dead in enumerate(self._dead) if serving[group] > dead}

    # ── a request ──
    async def submit(
        self,
        prompt: Sequence[int] | Ints,
        params: SamplingParams | None = None,
        *,
        values: Sequence[ImageInput] = (),
        items: tuple[Input, ...] = (),
        scope: Scope | None = None,
        priority: int = 0,
        client: str = "",
        salt: bytes = b"",
        chunk_format: ChunkFormat | None = None,
        timeout: float | None = None,
    ) -> OutputStream:
        """Sends a request to a group, and returns the stream of its answer.

        `values` are images that a thread puts into the store, which holds them until the stream is over; `items` are
        images that are in the store already, or inline. `scope` holds both: it belongs to the stream
        from now on, and is released also if this raises. `chunk_format`: the style of the answer, the head of each of
        its lines, and the index of its first choice. `timeout`: seconds from now until the end of the answer.

        Raises EngineError if no group accepts the request now.
        """
        began = time.monotonic()
        deadline = math.inf if timeout is None else began + timeout
        if scope is None and values:
            scope = Scope(self._store)
        try:
            if scope is not None and values:
                items += await asyncio.to_thread(_put, scope, tuple(values))
            stream = await self._submit(prompt, params, items, scope, priority, client, salt, chunk_format, deadline)
            stream.begin(self._abort, timeout, time.monotonic() - began)
            return stream
        except BaseException:
            if scope is not None:
                scope.release()
            raise

    async def _submit(
        self,
        prompt: Sequence[int] | Ints,
        params: SamplingParams | None,
        items: tuple[Input, ...],
        scope: Scope | None,
        priority: int,
        client: str,
        salt: bytes,
        chunk_format: ChunkFormat | None,
        deadline: float,
    ) -> OutputStream:
        ids = np.ascontiguousarray(prompt, np.int32)
        params = SamplingParams() if params is None else params
        keys = [item.key for item, _, _ in items if item.key is not None]
        group, incarnation = self._choose(traces(ids, salt, keys))
        request = self._number()
        stream = OutputStream(request, group, incarnation, ids.size, params.n, scope)
        self._keep(stream)
        try:
            submit = Submit(
                self._me.index,
                request,
                ids,
                params,
                priority,
                client,
                salt,
                columns_of_inputs([items]),
                chunk_format,
                secrets.randbits(64) if params.seed is None else params.seed % 2**64,
                time.monotonic_ns(),
            )
            await self._send(self._cores[group], submit, stream, deadline)
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _choose(self, hints: list[bytes]) -> tuple[int, int]:
        """Returns a group, and its incarnation. Raises EngineError if none serves."""
        if self._receive_error:
            raise EngineError(500, self._receive_error)
        if self._board.is_draining:
            raise EngineError(503, "the engine is shutting down, and accepts no more requests")
        serving = self.serving_groups
        loads = {group: max(self._rows[group][StatusBoard.OPEN], self._open[group]) for group in serving}
        if not loads:
            raise EngineError(503, "no group of the engine serves now: send the request again")
        group = self._router.choose(loads, hints)
        return group, serving[group]

    def _number(self) -> int:
        while self._next in self._streams:
            self._next = (self._next + 1) % MAX_REQUESTS
        request = self._next
        self._next = (request + 1) % MAX_REQUESTS
        return request

    async def _send(
        self, sender: AsyncSender, message: msgspec.Struct, stream: OutputStream, until: float = math.inf
    ) -> None:
        """Sends a message to the stream's group. Raises EngineError if it is dead or does not receive in time."""
        deadline = min(until, time.monotonic() + SEND_TIMEOUT)
        while True:
            try:
                return await sender.send(message, max(0.0, deadline - time.monotonic()))
            except PeerDied as death:  # perhaps the incarnation before: its death is new in this channel
                dead = ProcessId.of(death.name)
                is_group_dead = dead is not None and dead.incarnation >= stream.incarnation
                if is_group_dead or time.monotonic() > deadline:
                    raise EngineError(503, f"group {stream.group} has died: {death}") from None
                await asyncio.sleep(AGAIN)
            except PenstockError as error:
                status = 504 if time.monotonic() >= until else 503
                raise EngineError(status, f"group {stream.group} does not receive requests: {error}") from None

    def _abort(self, stream: OutputStream) -> None:
        """Drops a stream, and tells its core to abort the request."""
        self._drop(stream)
        task = asyncio.ensure_future(self._send_abort(stream))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_abort(self, stream: OutputStream) -> None:
        abort = Abort(self._me.index, np.array([stream.request], np.int32))
        try:
            await self._send(self._cores[stream.group], abort, stream)
        except EngineError as error:  # a group that is gone needs no message
            event("abort not sent", logging.WARNING, request=stream.request, error=error)

    # ── open requests ──
    def _keep(self, stream: OutputStream) -> None:
        self._streams[stream.request] = stream
        self._open[stream.group] += 1
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def _drop(self, stream: OutputStream) -> None:
        if self._streams.pop(stream.request, None) is not None:
            self._open[stream.group] -= 1

    def _look(self) -> None:
        self._watch = None
        serving = [row[StatusBoard.SERVING] for row in self._rows]
        streams = tuple(self._streams.values())
        self._fail(
            [stream for stream in streams if stream.incarnation != serving[stream.group]], "it does not serve any more"
        )
        if self._streams:
            self._watch = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def _fail(self, streams: list[OutputStream], why: str) -> None:
        for stream in streams:
            self._drop(stream)
            stream.fail(EngineError(503, f"group {stream.group} has died: {why}"))

    # ── what comes ──
    async def _receive_answers(self) -> None:
        """Receives answers. A failure ends all open streams, so that no reader goes on waiting."""
        try:
            await self._receive_loop()
        except Exception as error:
            self._receive_error = f"the client of the engine has failed: {type(error).__name__}: {error}"
            event("client receives no more answers", logging.ERROR, reason=self._receive_error)
            for stream in tuple(self._streams.values()):
                self._abort(stream)
                stream.fail(EngineError(500, self._receive_error))

    async def _receive_loop(self) -> None:
        while True:
            try:
                self._dispatch(await self._deltas.receive())
                for _ in range(MAX_AT_ONCE):
                    self._dispatch(self._deltas.receive_nowait())
                await asyncio.sleep(0)
            except WouldBlock:
                pass
            except PeerDied as death:
                self._process_death(death)
            except ClosedError:
                return
            except DecodeError as error:  # costs that message alone
                event("malformed message", logging.ERROR, error=error)

    def _process_death(self, death: PeerDied) -> None:
        dead = ProcessId.of(death.name)
        if dead is None or dead.kind == "server":
            return
        self._dead[dead.group] = max(self._dead[dead.group], dead.incarnation)
        streams = [
            stream
            for stream in self._streams.values()
            if stream.group == dead.group and stream.incarnation <= dead.incarnation
        ]
        self._fail(streams, str(death))

    def _dispatch(self, message: Delta | Failed) -> None:
        if isinstance(message, Failed):
            stream = self._streams.get(message.request)
            if stream is not None:
                self._drop(stream)
                stream.fail(EngineError(message.status, message.reason))
            return
        streams = self._streams
        for request, piece in split_delta(message):
            stream = streams.get(request)
            if stream is None:  # it was aborted
                continue
            if piece.reason in FAILURES:
                self._abort(stream)  # a request with a failed sample ends as a whole
                stream.fail(EngineError(*FAILURES[piece.reason]))
                continue
            stream.add(piece)
            if stream.is_over:
                self._drop(stream)


def _put(scope: Scope, values: tuple[ImageInput, ...]) -> tuple[Input, ...]:
    return tuple((scope.put(image.value, key=image.key), image.position, image.length) for image in values)
