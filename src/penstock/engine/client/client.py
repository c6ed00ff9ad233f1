"""The client of the engine in an API server: submits requests, and passes each answer's chunks to its stream.

One task per process receives the chunks of all requests. `router` chooses the group of a request, and `stream` is what
the caller of `submit` reads. The caller tokenizes texts and processes images before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock import ClosedError, DecodeError, PeerDied
from penstock.engine._native import ChunkSender
from penstock.engine.client.adapter_loader import AdapterLoader
from penstock.engine.client.blame import Blame
from penstock.engine.client.groups import CoreSenders, GroupLost, GroupReturn, NoGroupServes, Router
from penstock.engine.client.migration import Migration, ModelChanged
from penstock.engine.client.stream import EngineError, OutputStream, Placement, split_delta, take_vector
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster.blame_ledger import BlameLedger
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import VerdictBoard
from penstock.engine.protocol.columns import Input, columns_of_inputs
from penstock.engine.protocol.messages import (
    MAX_REQUESTS,
    AdapterState,
    ChunkFormat,
    Delta,
    Failed,
    FinishReason,
    Floats,
    Ints,
    SamplingParams,
    Submit,
)
from penstock.engine.text.grammar_fields import Grammar
from penstock.tensor import Handle, Scope

GROUP_POLL_S = 0.1  # seconds; whether a group has ended in peace, or began anew while this process was stopped
SMALL_GRAMMAR = 4096  # characters: travels inline, and is not put by a thread, which may wait for room in the store
SEED_BITS = 63  # of a drawn seed: a client may give it again as the `seed` of a request
FAILURES = {
    FinishReason.ERROR: (500, "the model's logits for this request are not finite"),
    FinishReason.MISSING: (
        503,
        "an image or video of this request, its prompt embeddings, or its grammar, were no longer in the store when a "
        "worker opened them: send the request again",
    ),
    FinishReason.MISFIT: (
        400,
        "an image or video of this request, or its prompt embeddings, do not fit the model, or the placeholder has "
        "another number of tokens",
    ),
    FinishReason.STUCK: (400, "the grammar, bad_words and allowed_token_ids rule out every token of the model"),
    FinishReason.GRAMMAR_LIMIT: (400, "the grammar takes more work than a step may: expected a simpler grammar"),
    FinishReason.GRAMMAR_MISFIT: (500, "the answer so far, which this model continues, is not of the grammar"),
}


class ImageInput(NamedTuple):
    """A processed image or video of a prompt: the tensors that the model's processor returns, and their placeholder."""

    value: Any  # a cluster of tensors
    position: int  # of the first placeholder token
    length: int  # of the placeholder, in tokens
    key: bytes | None = None  # a hash of the image and of its processing: a value with a known key is not stored again


class Client:
    """Submits requests to the engine. Used as `async with Client(cluster, member) as client`, in one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        member: ProcessId | int,
        counters: Sequence[MigrationCounters] | None = None,
        queue_counters: QueueCounters | None = None,
    ) -> None:
        """`member`: the server process that the client acts for; outside of the cluster, the index of a server will do.
        `counters`: of each group's requests; `queue_counters`: of new requests; None: those of the client itself."""
        self._me = ProcessId("server", 0, member, 1) if isinstance(member, int) else member
        self._config = cluster.config
        index, name = self._me.index, str(self._me)
        self._deltas = cluster.servers[index].open_async_receiver(name=name)
        self._cores = CoreSenders(cluster, self._me)
        self._board = StatusBoard(cluster.board)
        self._rows = self._board.rows
        self._verdicts = VerdictBoard(cluster.verdicts)
        self.counters = [MigrationCounters() for _ in cluster.inboxes] if counters is None else counters
        self._ledger = BlameLedger(cluster.blame, cluster.config.api_server_count, index)
        self._blame = Blame(self._ledger, self._board, self.counters)
        boards = (self._board, self._verdicts)
        self._migration = Migration(cluster.config, index, boards, self.counters, self, self._blame)
        self.queue_counters = QueueCounters() if queue_counters is None else queue_counters
        self._group_return = GroupReturn(cluster.config, self._board, self.queue_counters, lambda: self.can_submit)
        self._router = Router()
        self.adapters = AdapterLoader(index, len(cluster.inboxes), self._cores, lambda: self.serving_groups)
        self._store = cluster.store
        self._streams: dict[int, OutputStream] = {}
        self._sender = ChunkSender()
        self._open = [0] * len(cluster.inboxes)  # open requests of this client, by group
        self._next = secrets.randbelow(MAX_REQUESTS)  # random: a restarted server must not reuse its open numbers
        self._end: EngineError | None = None  # the client is closed, or its receiving task has failed
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        self._deltas.deliver(self._dispatch, self._handle_error)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Aborts open requests: their readers get an EngineError."""
        self._end_all(EngineError(503, "the client of the engine has been closed"))
        await self._group_return.close()
        await self._migration.close()
        await self._cores.close()
        if self._watch is not None:
            self._watch.cancel()
        self._deltas.close()
        self._board.close()
        self._verdicts.close()

    @property
    def open_requests(self) -> int:
        return len(self._streams) + len(self._migration.waiting)

    def take_vector(self, handle: Handle) -> Floats | None:
        """Returns the vector of a chunk, which the store keeps no longer; None: the store has given it up before."""
        return take_vector(handle, self._store)

    @property
    def serving_groups(self) -> dict[int, int]:
        """Returns the groups to which a request may be sent, each with its incarnation."""
        serving = enumerate(row[StatusBoard.SERVING] for row in self._rows)
        return {group: number for group, number in serving if not self._cores.is_dead(group, number)}

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
        account: str = "",
        salt: bytes = b"",
        chunk_format: ChunkFormat | None = None,
        timeout: float | None = None,
        request_id: str = "",
        grammar: Grammar | None = None,
        adapter: bytes = b"",
    ) -> OutputStream:
        """Sends a request to a group, and returns the stream of its answer.

        `values` are images that a thread puts into the store, which holds them until the stream is over; `items` are
        images that are in the store already, or inline. `scope` holds both: it belongs to the stream
        from now on, and is released also if this raises. `chunk_format`: the style of the answer, the head of each of
        its lines, and the index of its first choice. `timeout`: seconds from now until the end of the answer.
        `account`: of the client, which has a budget of trials of requests that may make processes fail; "": none has.
        `request_id`: how the log names the request. `grammar`: of the answer, which the caller has checked.
        `adapter`: the digest of a LoRA adapter in the config; b"": the model alone.

        Where a group is started again, and no other one serves, the request waits for it, `queue_timeout` seconds at
        most. Raises EngineError if no group accepts the request.
        """
        began = time.monotonic()
        deadline = math.inf if timeout is None else began + timeout
        if scope is None and (values or grammar is not None):
            scope = Scope(self._store)
        try:
            if scope is not None and values:
                items += await asyncio.to_thread(_put, scope, tuple(values))
            handle = None
            if scope is not None and grammar is not None:
                put = functools.partial(scope.put, grammar.text, key=grammar.key)
                handle = put() if len(grammar.text) < SMALL_GRAMMAR else await asyncio.to_thread(put)
            params = SamplingParams() if params is None else params
            submit = Submit(
                self._me.index,
                0,
                np.array(prompt, np.int32),  # a copy: it may be sent again
                params,
                priority,
                client,
                salt,
                columns_of_inputs([items]) if items else None,
                chunk_format,
                # The core checks the seed of a request.
                params.seed % (1 << 64) if isinstance(params.seed, int) else secrets.randbits(SEED_BITS),
                time.monotonic_ns(),
                request_id=request_id,
                grammar=handle,
                adapter=adapter,
            )
            submitted = SubmittedRequest(submit, request_id, self._config.migration_max_seq_len, account)
            if not self._ledger.quarantine.is_empty:
                self._blame.require_no_quarantine(submitted)
            stream = await self._submit(submitted, scope, deadline)
            stream.begin(self._abort, timeout, time.monotonic() - began)
            return stream
        except BaseException:
            if scope is not None:
                scope.release()
            raise

    async def _submit(self, submitted: SubmittedRequest, scope: Scope | None, deadline: float) -> OutputStream:
        began = time.monotonic()
        while True:
            await self._group_return.wait(deadline, began)
            if self._end is not None:
                raise self._end
            if self._board.is_draining:
                raise EngineError(503, "the engine is shutting down, and accepts no more requests")
            try:
                place = (stream := self._open_stream(submitted, scope)).place
            except NoGroupServes:
                if self.can_submit or self._group_return.is_due():  # a group was lost after the wait
                    continue
                raise
            try:
                await self._send_submit(stream, submitted.submit(stream.request), deadline)
                return stream
            except GroupLost as error:  # nothing was sent: the request is still a new one, if the death is certain
                if place.incarnation == self.serving_groups.get(place.group):
                    self._lose([stream], error.reason)
                    return stream
            except BaseException:
                self._forget(stream)
                raise

    def _open_stream(self, submitted: SubmittedRequest, scope: Scope | None) -> OutputStream:
        """Returns the stream of a request at a group that serves. Raises NoGroupServes."""
        prompt, params = submitted.first.prompt, submitted.first.params
        place = self._choose(submitted)
        is_kept = self._config.migration_limit > 0
        stream = OutputStream(*place, prompt.size, params.n, scope, submitted if is_kept else None, self._sender)
        names = {"request_id": submitted.request_id, "request": place.request, "group": place.group}
        event("request submitted", logging.DEBUG, **names, seed=submitted.first.seed)
        self._keep(stream)
        return stream

    def _choose(self, submitted: SubmittedRequest) -> Placement:
        """Returns a group for a request, and a new number. Raises NoGroupServes, and ModelChanged."""
        serving = self.groups_for(submitted)
        models = self._models(serving)
        if not models:
            raise NoGroupServes(503, "no group of the engine serves now: send the request again")
        if submitted.has_begun:
            models = {group: model for group, model in models.items() if model == submitted.model}
            if not models:
                raise ModelChanged
        loads = {group: max(self._rows[group][StatusBoard.OPEN], self._open[group]) for group in models}
        # A group without one of its output processors holds the requests of that one back until it has another.
        whole = {group: load for group, load in loads.items() if not self._rows[group][StatusBoard.ABSENT_OUTPUTS]}
        group = 0 if len(self._rows) == 1 else self._router.choose(whole or loads, submitted.traces)
        submitted.model = models[group]
        return Placement(self._number(), group, serving[group])

    def _models(self, serving: dict[int, int]) -> dict[int, int]:
        """Returns the model of each of these groups. Leaves out a group that has been lost meanwhile: the word may be
        cleared, or its next incarnation's."""
        models = {group: self._rows[group][StatusBoard.MODEL] for group in serving}
        return {group: models[group] for group in serving if self._rows[group][StatusBoard.SERVING] == serving[group]}

    def _number(self) -> int:
        while True:
            request, self._next = self._next, (self._next + 1) % MAX_REQUESTS
            if request not in self._streams:
                return request

    async def _send_submit(self, stream: OutputStream, submit: Submit, until: float = math.inf) -> None:
        """Sends a request to the group of its stream. Raises EngineError if that does not receive in time.

        Raises GroupLost if the group is dead, and drops the stream, unless the stream has left the group already.
        """
        place = stream.place
        try:
            await self._cores.send(place, submit, until)
        except GroupLost:
            if self._is_at(stream, place):
                self._drop(stream)
                raise
        except BaseException:
            if self._is_at(stream, place):
                self._drop(stream)
            raise
        else:
            if not self._is_at(stream, place):  # aborted or lost while the message waited for room
                self._cores.abort(place)

    def _is_at(self, stream: OutputStream, place: Placement) -> bool:
        """Returns whether the stream is open, and still has that place."""
        return self._streams.get(place.request) is stream

    def _abort(self, stream: OutputStream) -> None:
        """Forgets a stream, and has its core abort the request, unless the request waits for a group."""
        place, was_open = stream.place, stream.request in self._streams
        self._forget(stream)
        if was_open:
            self._cores.abort(place)

    # ── a request that its group has lost: for `Migration` ──
    def groups_for(self, submitted: SubmittedRequest) -> dict[int, int]:
        serving = self.serving_groups
        if len(serving) < 2 and not submitted.is_confined:  # no other group to choose
            return serving
        return self._blame.groups_for(submitted, serving, self._migration.has_confined)

    @property
    def can_submit(self) -> bool:
        serving = enumerate(row[StatusBoard.SERVING] for row in self._rows)
        return any(not self._cores.is_dead(group, number) for group, number in serving)

    def place_again(self, stream: OutputStream, submitted: SubmittedRequest) -> None:
        stream.place = self._choose(submitted)
        self._keep(stream)

    async def send_again(self, stream: OutputStream, submitted: SubmittedRequest) -> None:
        try:
            await self._send_submit(stream, submitted.submit(stream.request))
        except GroupLost as error:
            self._lose([stream], error.reason)

    # ── open requests ──
    def _keep(self, stream: OutputStream) -> None:
        self._streams[stream.request] = stream
        self._open[stream.group] += 1
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(GROUP_POLL_S, self._look)

    def _drop(self, stream: OutputStream) -> None:
        stream.leave_socket()
        if self._streams.pop(stream.request, None) is not None:
            self._open[stream.group] -= 1

    def _forget(self, stream: OutputStream) -> None:
        """Drops a stream, whether its request is open or waits for a group."""
        self._drop(stream)
        self._migration.discard(stream)

    def _look(self) -> None:
        self._watch = None
        serving = [row[StatusBoard.SERVING] for row in self._rows]
        gone = [stream for stream in self._streams.values() if stream.place.incarnation != serving[stream.group]]
        if gone:
            self._lose(gone, "it does not serve any more")
        streams = (*self._streams.values(), *self._migration.waiting)
        kept_tokens = [0] * len(self.counters)
        for stream in streams:
            stream.count_sent()
            if stream.submitted is not None:
                kept_tokens[stream.group] += stream.submitted.trim()
        for counters, tokens in zip(self.counters, kept_tokens, strict=True):
            counters[MigrationCounters.KEPT_TOKENS] = tokens
        if streams:
            self._watch = asyncio.get_running_loop().call_later(GROUP_POLL_S, self._look)

    def _lose(self, streams: list[OutputStream], why: str) -> None:
        """Takes the group from streams: their requests are submitted again, or end with an error."""
        for stream in streams:
            self._drop(stream)
        self._migration.add(streams, why)

    def _end_all(self, error: EngineError) -> None:
        """Ends the open requests, those that wait, and all that would come, with an error."""
        self._end = error
        self._group_return.end()
        for stream in tuple(self._streams.values()):
            self._abort(stream)
            stream.fail(error)
        self._migration.fail_all(error)

    # ── what comes ──
    def _handle_error(self, error: Exception) -> bool:
        """Handles an error in the place of an answer. Returns whether further answers are received. A failure of the
        client ends all open streams, so that no reader goes on waiting."""
        try:
            if isinstance(error, PeerDied):
                self._process_death(error)
            elif isinstance(error, DecodeError):  # costs that message alone
                event("malformed message", logging.ERROR, error=error)
            elif not isinstance(error, ClosedError):
                raise error
            return not isinstance(error, ClosedError)
        except Exception as failure:
            reason = f"the client of the engine has failed: {type(failure).__name__}: {failure}"
            event("client receives no more answers", logging.ERROR, reason=reason)
            self._end_all(EngineError(500, reason))
            return False

    def _process_death(self, death: PeerDied) -> None:
        dead = ProcessId.of(death.name)
        if dead is None or dead.kind not in ("core", "bridge"):  # the core reports an output processor's losses
            return
        self._cores.mark_dead(dead.group, dead.incarnation)
        streams = [
            stream
            for stream in self._streams.values()
            if stream.group == dead.group and stream.place.incarnation <= dead.incarnation
        ]
        self._lose(streams, str(death))

    def _dispatch(self, message: Delta | Failed | AdapterState) -> None:
        if isinstance(message, AdapterState):
            return self.adapters.on_state(message)
        if isinstance(message, Failed):
            if (stream := self._streams.get(message.request)) is None:
                return
            self._drop(stream)
            if message.resume is not None:
                return self._migration.add_failed(stream, message)
            self._migration.discard(stream)
            return stream.fail(EngineError(message.status, message.reason))
        streams, resuming = self._streams, self._migration.resuming
        for entry in message.prompt_logprobs:
            if (stream := streams.get(entry.number)) is not None:
                stream.prompt_logprobs.append(entry)
        text, finished = bytes(message.text), message.finished
        columns = message.counts, message.samples, None if finished is None else finished.rows
        try:
            left, rests = self._sender.send(message.rows, message.numbers, text, *columns)
        except ValueError as error:  # before anything of the message was sent
            return event("malformed message", logging.ERROR, error=error)
        for request, at, nbytes, sent in rests:
            streams[request].write_rest(text[at : at + nbytes], sent)
        for request, chunk in split_delta(message, left):
            stream = streams.get(request)
            if stream is None:  # it was aborted
                continue
            if chunk.reason in FAILURES:
                self._abort(stream)  # a request with a failed sample ends as a whole
                stream.fail(EngineError(*FAILURES[chunk.reason]))
                continue
            if resuming and request in resuming:
                self._migration.on_chunk(request)
            stream.add(chunk)
            if stream.is_over:
                self._drop(stream)


def _put(scope: Scope, values: tuple[ImageInput, ...]) -> tuple[Input, ...]:
    return tuple((scope.put(image.value, key=image.key), image.position, image.length) for image in values)
