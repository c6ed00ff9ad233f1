"""A client of the engine, in any process that has a place as a server: submits requests, and gives out their answers.

One task per process receives for all requests. Leaves to `router` which group gets a request, to `stream` what its
reader sees, and text and images to the caller of `submit`.
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

from penstock import AsyncMessageSender, ClosedError, DecodeError, PeerDied, PenstockError, WouldBlock
from penstock.engine.client.delta_splitter import split_delta
from penstock.engine.client.router import Router, traces
from penstock.engine.client.stream import EngineError, OutputStream
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
from penstock.tensor import Outgoing, Scope

MAX_AT_ONCE = 64  # messages, before other tasks of the loop have their turn
SEND_TIMEOUT = 5.0  # seconds; for a core that takes no requests
LOOK_AGAIN = 0.1  # seconds; whether a group has ended in peace, or began anew while this process was stopped
FAILURES = {
    FinishReason.ABORT: (503, "the engine has given this request up: too much of what it told was not read"),
    FinishReason.ERROR: (500, "the model's numbers for this request were not numbers"),
    FinishReason.MISSING: (
        503,
        "an image of this request was not in the store any more when it was needed: send it again",
    ),
    FinishReason.MISFIT: (400, "an image of this request is not what the model takes, or not as long as its place"),
}


class ImageInput(NamedTuple):
    """A tree of tensors that stands in a prompt instead of text: what the model's processor makes of an image."""

    value: Any
    position: int
    length: int  # in ids
    key: bytes | None = None  # of what it is made of and how: the same value again is only looked up


class Client:
    """`async with Client(tree, member) as client`, in the event loop that uses it."""

    def __init__(self, tree: Cluster, member: ProcessId | int) -> None:
        """`member`: the place among the servers; a number is enough in a process that is not one of the tree's."""
        self._me = ProcessId("server", 0, member, 1) if isinstance(member, int) else member
        self._config = tree.config
        index, name = self._me.index, str(self._me)
        self._deltas = tree.servers[index].async_receiver(name=name)
        self._cores = [group.inbox.async_sender(index, name=name) for group in tree.groups]
        self._board = StatusBoard(tree.board)
        self._rows = self._board.rows
        self._balance = Router()
        self.outgoing = Outgoing(tree.store)
        self._streams: dict[int, OutputStream] = {}
        self._open = [0] * len(tree.groups)  # of ours
        self._dead = [0] * len(tree.groups)  # the incarnation that we know to be dead
        self._next = secrets.randbelow(MAX_REQUESTS)  # random: not those of the process that had this place before
        self._sending: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._receive_error = ""  # why nothing is heard any more
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        self._listening = asyncio.ensure_future(self._listen())
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
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        for end in (self._deltas, *self._cores):
            end.close()
        self._board.close()

    @property
    def open_requests(self) -> int:
        return len(self._streams)

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
        """Sends a request to a group. `timeout`: from now until the end of the answer.

        What stands in the prompt instead of text: `values` are put into the store beside the loop, and held there
        until the stream is over; `items` are there already, or inline. `scope` holds them: one of `outgoing`, which is
        the stream's from now on, and released also where this raises.

        Raises EngineError where no group takes it now.
        """
        began = time.monotonic()
        deadline = math.inf if timeout is None else began + timeout
        if scope is None and values:
            scope = self.outgoing.scope()
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
            )
            await self._send(self._cores[group], submit, stream, deadline)
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _choose(self, asked: list[bytes]) -> tuple[int, int]:
        """A group, and its incarnation."""
        if self._receive_error:
            raise EngineError(500, self._receive_error)
        if self._board.is_draining:
            raise EngineError(503, "the engine is about to end, and takes no more requests")
        serving = [row[StatusBoard.SERVING] for row in self._rows]
        loads = {
            group: max(row[StatusBoard.OPEN], self._open[group])
            for group, row in enumerate(self._rows)
            if serving[group] > self._dead[group]
        }
        if not loads:
            raise EngineError(503, "no group of the engine serves now")
        group = self._balance.choose(loads, asked)
        return group, serving[group]

    def _number(self) -> int:
        while self._next in self._streams:
            self._next = (self._next + 1) % MAX_REQUESTS
        request = self._next
        self._next = (request + 1) % MAX_REQUESTS
        return request

    async def _send(
        self, sender: AsyncMessageSender, message: msgspec.Struct, stream: OutputStream, until: float = math.inf
    ) -> None:
        """Raises EngineError where the group of this stream does not take it."""
        deadline = min(until, time.monotonic() + SEND_TIMEOUT)
        while True:
            try:
                return await sender.send(message, max(0.0, deadline - time.monotonic()))
            except PeerDied as death:  # perhaps the incarnation before: its death is new in this channel
                who = ProcessId.of(death.name)
                is_its = who is not None and who.incarnation >= stream.incarnation
                if is_its or time.monotonic() > deadline:
                    raise EngineError(503, f"group {stream.group} has died: {death}") from None
                await asyncio.sleep(AGAIN)
            except PenstockError as error:
                status = 504 if time.monotonic() >= until else 503
                raise EngineError(status, f"group {stream.group} takes no requests: {error}") from None

    def _abort(self, stream: OutputStream) -> None:
        """Its reader wants no more."""
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
        self._fail([one for one in streams if one.incarnation != serving[one.group]], "it does not serve any more")
        if self._streams:
            self._watch = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def _fail(self, streams: list[OutputStream], why: str) -> None:
        for stream in streams:
            self._drop(stream)
            stream.fail(EngineError(503, f"group {stream.group} has died: {why}"))

    # ── what comes ──
    async def _listen(self) -> None:
        """Receives answers. A failure ends all open streams, so that no reader goes on waiting."""
        try:
            await self._receive_loop()
        except Exception as error:
            self._receive_error = f"the client of the engine has failed: {type(error).__name__}: {error}"
            event("client does not hear any more", logging.ERROR, reason=self._receive_error)
            for stream in tuple(self._streams.values()):
                self._abort(stream)
                stream.fail(EngineError(500, self._receive_error))

    async def _receive_loop(self) -> None:
        while True:
            try:
                self._take(await self._deltas.receive())
                for _ in range(MAX_AT_ONCE):
                    self._take(self._deltas.receive_nowait())
                await asyncio.sleep(0)
            except WouldBlock:
                pass
            except PeerDied as death:
                self._hear_of(death)
            except ClosedError:
                return
            except DecodeError as error:  # costs that message alone
                event("not a message", logging.ERROR, error=error)

    def _hear_of(self, death: PeerDied) -> None:
        who = ProcessId.of(death.name)
        if who is None or who.kind == "server":
            return
        self._dead[who.group] = max(self._dead[who.group], who.incarnation)
        its = [one for one in self._streams.values() if one.group == who.group and one.incarnation <= who.incarnation]
        self._fail(its, str(death))

    def _take(self, message: Delta | Failed) -> None:
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
                self._abort(stream)  # its other samples are in vain
                stream.fail(EngineError(*FAILURES[piece.reason]))
                continue
            stream.add(piece)
            if stream.is_over:
                self._drop(stream)


def _put(scope: Scope, values: tuple[ImageInput, ...]) -> tuple[Input, ...]:
    return tuple((scope.put(one.value, one.key), one.position, one.length) for one in values)
