"""The core process: receives requests, broadcasts each step while the one before it runs, and receives its result.

A core touches neither text nor images. It blocks only on a step's result, or, with no step in flight, on its inbox. The
scheduler decides which sequences run, the outbox keeps messages for slow servers. The launcher handles a death within
the group; of an output processor, the core ends its share of the requests.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock import DecodeError, PeerDied, Timeout
from penstock.codec.sequence import SequenceSender
from penstock.engine.cluster.group_ends import TOO_SLOW, GroupSender, Outbox, is_stale_death
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.core.adapter_changes import AdapterChanges
from penstock.engine.core.admission_gate import AdmissionGate
from penstock.engine.core.await_members import await_members, await_receivers, require_one_model
from penstock.engine.core.in_flight_requests import InFlightRequests
from penstock.engine.core.kv_ledger import RESUMED_COMPUTED, RESUMED_FOUND, open_cache
from penstock.engine.core.output_senders import OutputSenders
from penstock.engine.core.request import RequestRefused
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import (
    MAX_REQUESTS,
    Abort,
    AdapterChange,
    AdapterState,
    Begin,
    Failed,
    OutputReady,
    Ready,
    Resume,
    StepDone,
    Stop,
    Submit,
    Tokens,
)

T = TypeVar("T")
STOP_TIMEOUT = 3.0  # seconds; for a Stop to workers that may be stuck
MAX_RECEIVED = 256  # messages between two steps, so that a flood of requests does not delay running ones


class OutputBatch(Protocol):
    """The output of one Tokens message."""

    @property
    def aborts(self) -> Sequence[Abort]:
        """The samples that a stop string has ended."""

    @property
    def deltas(self) -> Sequence[tuple[int, Any]]:
        """Pairs of a server and its message."""


class InlineOutput(Protocol):
    """Detokenizes in the core's loop if the engine has no output processors."""

    def forget_server(self, server: int) -> object: ...
    def process(self, tokens: Tokens) -> OutputBatch: ...


def run(
    cluster: Cluster, me: ProcessId, inline_output: Callable[[EngineConfig], InlineOutput] | None = None
) -> EngineCore:
    """Runs a core until a Stop arrives, and returns it: its ends stay open. It uses `inline_output` where the engine
    has no output processors."""
    with starting():
        core = EngineCore(cluster, me, None if inline_output is None else inline_output(cluster.config))
    gc.freeze()  # objects alive now stay alive: a collection that scanned them would delay several steps
    core.run()
    return core


class EngineCore:
    def __init__(self, cluster: Cluster, me: ProcessId, inline_output: InlineOutput | None = None) -> None:
        """Waits for the workers and the output processors, and then serves. If a Stop arrives before the workers are
        ready, `run` only passes it on. Raises Timeout, PeerDied of one of them, and RuntimeError for different models.
        """
        self._config, group = cluster.config, cluster.groups[me.group]
        self._me = me
        self._cluster = cluster
        self._row = StatusBoard(cluster.board, writable=True).row(me.group)
        name = str(me)
        self._inbox = group.inbox.open_receiver(name=name)
        self._results = group.results.open_receiver(0, name=name)
        self._steps = GroupSender(group.steps.open_sender(name=name), me, cluster.config.step_timeout)
        self._outputs = OutputSenders(cluster, me, self._waiting)
        self._gate = AdmissionGate(cluster.config.output_processors)
        self._outbox = Outbox(cluster, me)
        self._inline_output = inline_output
        self._has_delivered = True  # the output processors had delivered all when requests were admitted last
        self._own_ns, self._woke_ns = 0, time.monotonic_ns()
        ready = await_members(cluster, me, self._inbox)
        self._is_stopped = ready is None
        if ready is not None:
            self._serve(ready)

    def _serve(self, ready: list[Ready]) -> None:
        config = self._config
        capacities = [message.blocks for message in ready]
        blocks = min(
            capacities if config.num_gpu_blocks_override is None else [*capacities, config.num_gpu_blocks_override]
        )
        model = require_one_model(ready)
        batch = BatchState(config.max_num_seqs, blocks, config.block_size, config.max_blocks_per_request)
        await_receivers(self._cluster, self._me)
        cache = open_cache(self._cluster.kv_files_of(self._me.group), ready, batch, self._row)
        self._scheduler = Scheduler(batch, SchedulerConfig.of(config, ready), cache)
        broadcast = partial(self._steps.send, timeout=config.step_timeout)
        self._adapters = AdapterChanges(self._scheduler, len(ready), broadcast, self._outbox.send)
        self._batch = batch
        self._in_flight_requests = InFlightRequests(self._cluster, self._me, batch.slots, self._outputs.undelivered)
        self._sequence = SequenceSender(self._steps)
        self._begin(Begin(self._sequence.leader, 0, batch.slots, batch.blocks, batch.block_size))
        self._plan = StepBuilder(batch)
        self._row[StatusBoard.BLOCKS] = batch.blocks
        self._row[StatusBoard.MODEL] = model  # before SERVING: `Client` reads them in the other order
        self._row[StatusBoard.SERVING] = self._me.incarnation
        if self._cluster.adapters is not None:
            self._adapters.adopt(ready, self._cluster.adapters.read())
            self._await_adapters()
        event("core serves", blocks=batch.blocks, slots=batch.slots, model=f"{model:016x}")

    def run(self) -> None:
        """Runs steps until the launcher sends a Stop, which is passed on when the last result is in."""
        if not self._is_stopped:
            self._run_steps()
        self._steps.send(Stop(), STOP_TIMEOUT)
        self._outputs.stop()
        self._row[StatusBoard.SERVING] = 0

    def _run_steps(self) -> None:
        """Decides and sends each step while the one before it runs."""
        self._receive_requests()
        while not self._is_stopped:
            while self._scheduler.schedule(self._plan):
                self._broadcast_step()
            self._send_tokens()
            if self._scheduler.in_flight:
                self._process_result(self._receive_result())
            else:
                self._wait_for_work()
            self._receive_requests()
        while self._scheduler.in_flight:
            self._process_result(self._receive_result())
        self._send_tokens()

    def close(self) -> None:
        for end in (self._inbox, self._results, self._steps, self._outbox, self._outputs):
            end.close()

    def _await_adapters(self) -> None:
        """Waits until the ranks have loaded the adapters that a rank lacked: requests for these adapters wait, too.
        Raises Timeout."""
        deadline = time.monotonic() + self._config.start_timeout
        while self._adapters.is_loading and not self._is_stopped:
            self._receive(partial(self._inbox.receive, max(0.0, deadline - time.monotonic())))

    def _begin(self, begin: Begin) -> None:
        self._sequence.send_whole(begin, self._config.step_timeout)

    # ── the loop's parts ──
    def _broadcast_step(self) -> None:
        """Sends the step that the scheduler has decided, and applies it here."""
        scheduler = self._scheduler
        step = self._plan.build(self._sequence.leader, self._sequence.next_number)
        self._in_flight_requests.on_step(step, self._gate.trial is not None)
        self._sequence.send(step, self._config.step_timeout)
        self._batch.apply(step)
        self._outputs.queue(scheduler.on_sent(step), scheduler.closed)
        if scheduler.admitted:
            self._count_queue_times()
        self._publish()

    def _count_queue_times(self) -> None:
        now = time.monotonic_ns()
        for sample in self._scheduler.admitted:
            sample.admitted_ns = now
            StatusBoard.QUEUE_TIMES.observe(self._row, (now - sample.request.queued_ns) / 1e9)
        self._scheduler.admitted.clear()

    def _count_times(self) -> None:
        """Counts what the samples that have ended took, and notes when others had their first token."""
        now, row, scheduler = time.monotonic_ns(), self._row, self._scheduler
        for sample in scheduler.answered:
            sample.first_ns = now
        for sample in scheduler.ended:
            if sample.first_ns:  # else it was resumed
                StatusBoard.PREFILL_TIMES.observe(row, (sample.first_ns - sample.admitted_ns) / 1e9)
                StatusBoard.DECODE_TIMES.observe(row, (now - sample.first_ns) / 1e9)
                StatusBoard.INFERENCE_TIMES.observe(row, (now - sample.admitted_ns) / 1e9)
        scheduler.answered.clear()
        scheduler.ended.clear()

    def _receive_requests(self) -> None:
        """Handles the messages in the inbox, up to MAX_RECEIVED of them."""
        for _ in range(MAX_RECEIVED):
            if not self._receive(self._inbox.try_receive):
                break
        self._admit()
        if self._adapters.leaving:
            self._adapters.release()

    def _admit(self) -> None:
        """Passes requests to the scheduler, but for those that have to wait."""
        scheduler, gate = self._scheduler, self._gate
        if gate.needs_quiet and scheduler.open_requests:
            self._send_back(scheduler.abort_all(lambda request: True), Resume.SUSPECT_RUNS, "a suspect is tried alone")
        self._has_delivered = self._outputs.has_delivered
        while submits := gate.take(self._is_quiet, self._has_delivered, scheduler.generated):
            if gate.trial is not None:
                event("suspect is tried alone", request=str(gate.trial))
            self._in_flight_requests.on_admit(
                [(submit.server, submit.request) for submit, _ in submits], gate.trial is not None
            )
            for submit, queued_ns in submits:
                try:
                    scheduler.submit(submit, queued_ns)
                except RequestRefused as refusal:
                    self._fail(submit.server, submit.request, refusal)

        if refused := gate.take_refused():
            self._send_back(refused, Resume.TRIAL_REFUSED, "a suspect may not be tried")

    @property
    def _is_quiet(self) -> bool:
        """Returns whether no request runs, and output processors have delivered what has run: no failure that comes
        now is its doing."""
        scheduler = self._scheduler
        return not scheduler.open_requests and not scheduler.in_flight and self._has_delivered

    def _send_back(self, requests: list[tuple[int, int]], resume: Resume, reason: str) -> None:
        """Lets the servers of aborted requests submit them again."""
        for server, request in requests:
            if not self._outbox.send(server, Failed(request, 503, reason, resume)):
                self._give_up(server)

    def _receive(self, receive: Callable[[], Any]) -> bool:
        """Handles the next message, or a death in its place. Returns False if `receive` returns None: none comes."""
        try:
            message = receive()
        except PeerDied as death:
            self._process_death(death)
        except DecodeError as error:
            self._drop_malformed(error)
        else:
            if message is None:
                return False
            self._dispatch(message)
        return True

    def _drop_malformed(self, error: DecodeError) -> None:
        """Drops a malformed message from a server; re-raises `error` for any other sender."""
        server = self._inbox.source
        if server >= self._config.api_server_count:
            raise error
        event("malformed message", logging.ERROR, server=server, error=str(error))
        request = error.fields[1] if error.kind is Submit and len(error.fields) > 1 else None
        if isinstance(request, int) and 0 <= request < MAX_REQUESTS:  # the server waits for an answer
            self._fail(server, request, RequestRefused(400, f"the request is not what was expected: {error}"))

    def _is_of_another(self, message: Any) -> bool:
        """Returns whether a server sent this message as another server. Output processors send for all servers."""
        server = self._inbox.source
        return (
            isinstance(message, Submit | Abort | AdapterChange)
            and message.server != server < self._config.api_server_count
        )

    def _dispatch(self, message: Any) -> None:
        if not self._is_of_another(message):
            return self._process(message)
        server = self._inbox.source
        names = {"says": message.server, "message": type(message).__name__}
        event("message under another server's number", logging.ERROR, server=server, **names)
        if isinstance(message, Submit):
            self._fail(
                server, message.request, RequestRefused(400, f"server {server} asked as server {message.server}")
            )

    def _process(self, message: Any) -> None:
        scheduler = self._scheduler
        if isinstance(message, Submit):
            if not self._gate.put(message, time.monotonic_ns()):
                self._fail(message.server, message.request, RequestRefused(409, "a request of this number waits"))
        elif isinstance(message, Abort):
            requests = message.requests.tolist()
            samples = [None] * len(requests) if message.samples is None else message.samples.tolist()
            for request, sample in zip(requests, samples, strict=True):
                self._gate.abort(message.server, request)
                scheduler.abort(message.server, request, sample)
        elif isinstance(message, OutputReady):
            self._attach_output(message)
        elif isinstance(message, AdapterChange):
            self._adapters.begin(message)
        elif isinstance(message, AdapterState):
            self._adapters.on_state(message)
        elif isinstance(message, Stop):
            self._is_stopped = True

    def _fail(self, server: int, request: int, refusal: RequestRefused) -> None:
        event("request refused", server=server, request=request, status=refusal.status, reason=str(refusal))
        if not self._outbox.send(server, Failed(request, refusal.status, str(refusal))):
            self._give_up(server)

    def _receive_result(self) -> StepDone:
        """Waits for the result of the oldest step in flight."""
        self._outbox.flush()
        number = self._sequence.number - self._scheduler.in_flight + 1
        try:
            done: StepDone = self._waiting(lambda: self._results.receive(self._config.step_timeout))
        except Timeout as error:
            raise Timeout(f"no StepDone for step {number} within {self._config.step_timeout:g} s: {error}") from None
        if (done.leader, done.number) != (self._sequence.leader, number):
            raise RuntimeError(f"expected the StepDone of step {number}, got that of {done.number}")
        return done

    def _process_result(self, done: StepDone) -> None:
        scheduler = self._scheduler
        self._in_flight_requests.on_result()
        self._outputs.queue(scheduler.on_result(done), scheduler.closed)
        self._gate.count_result(done.ids.size)
        if scheduler.answered or scheduler.ended:
            self._count_times()
        if scheduler.in_flight:  # else the device waits, and the next step goes first
            self._send_tokens()

    def _send_tokens(self) -> None:
        """Sends output processors the messages that are due."""
        if self._inline_output is None:
            for output in self._outputs.send_queued():
                self._lose_output(output)
        else:
            for tokens in self._outputs.take_queue():
                self._answer(self._inline_output.process(tokens))

    def _lose_output(self, output: int) -> None:
        """Ends the share of an output processor that has died. New requests of it wait for its next life."""
        lost = self._outputs.lose(output)
        lost += self._scheduler.abort_all(lambda request: request.number % self._config.output_processors == output)
        event("output processor lost", logging.WARNING, output=output, requests=len(lost))
        self._send_back(lost, Resume.OUTPUT_DIED, f"output processor {output} of group {self._me.group} has died")
        self._gate.hold(self._outputs.absent)

    def _attach_output(self, ready: OutputReady) -> None:
        """Lets the requests of an output processor run again that receives in its next life."""
        if not self._outputs.is_new(ready):
            return
        if ready.index not in self._outputs.absent:  # its death has not been reported
            self._lose_output(ready.index)
        self._scheduler.forget_output(ready.index)
        self._outputs.attach(ready)
        self._gate.hold(self._outputs.absent)
        event("output processor serves again", output=ready.index, life=ready.life)

    def _answer(self, batch: OutputBatch) -> None:
        slow = [server for server, delta in batch.deltas if not self._outbox.send(server, delta)]
        for abort in batch.aborts:
            self._process(abort)
        for server in slow:
            self._give_up(server)

    def _wait_for_work(self) -> None:
        """Sleeps until a message comes: no step is in flight, and none can be decided."""
        self._publish()
        if self._has_delivered:
            self._in_flight_requests.on_idle()
        self._outbox.flush()
        wait = AGAIN if self._outbox.has_backlog or not self._has_delivered else None
        with contextlib.suppress(Timeout):
            self._receive(lambda: self._waiting(partial(self._inbox.receive, wait)))

    def _process_death(self, death: PeerDied) -> None:
        """Forgets a dead server's requests, and ends those of a dead output processor; ignores a stale death; re-raises
        any other."""
        if self._is_server(death):
            self._outbox.forget(death.index)
            self._forget(death.index)
        elif self._outputs.is_output(death):
            output = self._outputs.find_death(death)
            if output is not None:
                self._lose_output(output)
        elif not is_stale_death(self._me, death):
            raise death

    def _is_server(self, death: PeerDied) -> bool:
        """Returns whether a server died, by its lane of the inbox: the name of a dead peer may be gone."""
        return death.index < self._config.api_server_count

    def _give_up(self, server: int) -> None:
        """Fails all open requests of a server that reads too slowly."""
        for request in self._forget(server):
            self._outbox.send(server, Failed(request, *TOO_SLOW))

    def _forget(self, server: int) -> list[int]:
        """Aborts all open requests of a server and returns their numbers."""
        event("server forgotten", server=server)
        if self._inline_output is not None:
            self._inline_output.forget_server(server)
        requests = self._scheduler.abort_all(lambda request: request.server == server)
        return [*(number for _, number in requests), *self._gate.forget_server(server)]

    def _waiting(self, call: Callable[[], T]) -> T:
        """Returns the result of `call`; its time does not count as the core's own (`OWN_NS`)."""
        now = time.monotonic_ns()
        self._own_ns += now - self._woke_ns
        try:
            return call()
        finally:
            self._woke_ns = time.monotonic_ns()

    def _publish(self) -> None:
        scheduler, row = self._scheduler, self._row
        row[StatusBoard.OPEN] = scheduler.open_requests + self._gate.open_requests
        row[StatusBoard.SUSPECTS] = self._gate.suspects
        row[StatusBoard.RUNNING] = running = self._batch.rows.size
        row[StatusBoard.WAITING] = max(0, scheduler.open_samples + self._gate.open_samples - running)
        row[StatusBoard.ADAPTERS], row[StatusBoard.ADAPTED] = len(scheduler.adapters), scheduler.adapters.total()
        row[StatusBoard.PREEMPTIONS] = scheduler.preemptions
        row[StatusBoard.PREFIX_QUERIES], row[StatusBoard.PREFIX_HITS] = scheduler.prefix_queries, scheduler.prefix_hits
        row[RESUMED_FOUND], row[RESUMED_COMPUTED] = scheduler.resumed_found, scheduler.resumed_computed
        row[StatusBoard.FREE_BLOCKS] = scheduler.cache.num_free
        row[StatusBoard.STEPS] = self._sequence.number
        row[StatusBoard.OWN_NS] = self._own_ns
