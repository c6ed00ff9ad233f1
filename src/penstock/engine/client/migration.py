"""Requests that their group has lost wait here until the cause is known and a group serves, and are submitted again.

A client loses the requests of a group when one of its processes has died, or when the group is restarted; and those of
an output processor when that has died. `SubmittedRequest` has what is submitted again. The launcher finds the cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from penstock.engine.client.blame import CONVICTION, OVER_BUDGET, Blame
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.migration_counters import CAUSES, OUTPUT, MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.verdict_board import Cause, Verdict, VerdictBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Failed, Resume

BOARD_POLL_S = 0.01  # seconds between two reads of the boards, while requests wait
SHOWN_IDS = 8  # of the requests of a loss, in the log
NO_VERDICT = Verdict(Cause.UNKNOWN, frozenset(), False)


class ModelChanged(EngineError):
    """The answer has begun, and its model has gone: another model would continue it."""

    def __init__(self) -> None:
        what = (
            "the model's files have been replaced since the answer began, and no group serves the former model any more"
        )
        super().__init__(503, f"{what}: send the request again")


class Submitter(Protocol):
    """What the client does for a request that is submitted again."""

    @property
    def can_submit(self) -> bool:
        """Returns whether a group serves now."""

    def groups_for(self, submitted: SubmittedRequest) -> dict[int, int]:
        """Returns the groups that may run a request now, each with its incarnation."""

    def place_again(self, stream: OutputStream, submitted: SubmittedRequest) -> None:
        """Gives the stream a group and a new number. Raises ModelChanged if all groups that serve have another model
        than the begun answer, EngineError if no group serves."""

    async def send_again(self, stream: OutputStream, submitted: SubmittedRequest) -> None:
        """Sends the request to that group. Raises EngineError, and forgets the number, if the group is stuck."""


@dataclass
class Loss:
    """The loss of one request's group."""

    group: int
    incarnation: int
    why: str
    since: float  # the first loss since the last chunk, on the monotonic clock
    deadline: float
    request_id: str
    is_judged: bool = False  # the cause is known, and the request may be submitted again

    @property
    def lives(self) -> tuple[int, int]:
        """Returns the group and its incarnation."""
        return self.group, self.incarnation


@dataclass
class LossOutcome:
    """What has become of the requests of one incarnation of a group."""

    pauses: dict[str, float] = field(default_factory=dict)  # of requests that go on, by id
    given_up: int = 0


class Migration:
    """The lost requests of one client."""

    def __init__(
        self,
        config: EngineConfig,
        server: int,
        boards: tuple[StatusBoard, VerdictBoard],
        counters: Sequence[MigrationCounters],
        submitter: Submitter,
        blame: Blame,
    ) -> None:
        """`server`: the index under which the client submits. `counters`: one for each group."""
        self._limit = config.migration_limit
        self._timeout = config.migration_timeout
        self._max_tokens = config.migration_max_seq_len
        self._server = server
        self._board, self._verdicts = boards
        self._counters = counters
        self._submitter = submitter
        self._blame = blame
        self.waiting: dict[OutputStream, Loss] = {}
        self._task: asyncio.Task[None] | None = None
        self._outcomes: dict[tuple[int, int], LossOutcome] = {}  # of losses, until no request of them waits
        self.resuming: dict[int, Loss] = {}  # by request: submitted again, and no chunk has come since

    @property
    def has_confined(self) -> bool:
        """Returns whether a request waits for the group for trials."""
        return any(_submitted(stream).is_confined for stream in self.waiting)

    # ── requests come and go ──
    def add(self, streams: Iterable[OutputStream], why: str) -> None:
        """Takes streams that their group has lost. Those that cannot be resumed end with an error."""
        for stream in streams:
            self._add(stream, f"group {stream.group} has died: {why}")

    def add_failed(self, stream: OutputStream, failed: Failed) -> None:
        """Takes a stream that its core has given up, and that may be submitted again."""
        loss = self._add(stream, failed.reason)
        if loss is None:
            return
        if failed.resume == Resume.OUTPUT_DIED:
            return self._count(stream, OUTPUT)
        if failed.resume == Resume.TRIAL_REFUSED:
            self._blame.count_refused_trial(loss.group)
            return self._give_up(stream, OVER_BUDGET)
        loss.is_judged = True

    def _add(self, stream: OutputStream, why: str) -> Loss | None:
        before = self.resuming.pop(stream.request, None)
        submitted = stream.submitted
        if submitted is None:
            self._give_up(stream, why)
            return None
        if submitted.is_too_long:
            self._give_up(stream, f"{why}; it has had more than migration_max_seq_len ({self._max_tokens}) tokens")
            return None
        submitted.clear_if_advanced(self._limit)
        now = time.monotonic()
        since = now if before is None else before.since
        loss = Loss(stream.group, stream.place.incarnation, why, since, now + self._timeout, submitted.request_id)
        self._outcomes.setdefault(loss.lives, LossOutcome())
        self._wait(stream, loss)
        if before is not None:
            self._report_if_last(before.lives)
        return loss

    def _wait(self, stream: OutputStream, loss: Loss) -> None:
        self.waiting[stream] = loss
        self._counters[loss.group][MigrationCounters.WAITING] += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def discard(self, stream: OutputStream) -> bool:
        """Forgets a stream. Returns whether its request was waiting, and so is known to no core."""
        resuming, loss = self.resuming.pop(stream.request, None), self._stop_waiting(stream)
        for ended in (resuming, loss):
            if ended is not None:
                self._report_if_last(ended.lives)
        return loss is not None

    def _stop_waiting(self, stream: OutputStream) -> Loss | None:
        loss = self.waiting.pop(stream, None)
        if loss is not None:
            self._counters[loss.group][MigrationCounters.WAITING] -= 1
        return loss

    def on_chunk(self, request: int) -> None:
        """Counts the pause of a request that goes on."""
        loss = self.resuming.pop(request)
        pause = time.monotonic() - loss.since
        MigrationCounters.PAUSE.observe(self._counters[loss.group].words, pause)
        self._outcomes[loss.lives].pauses[loss.request_id] = pause
        self._report_if_last(loss.lives)

    def _report_if_last(self, lives: tuple[int, int]) -> None:
        """Reports the outcome of a loss when none of its requests waits any more."""
        if any(loss.lives == lives for loss in chain(self.waiting.values(), self.resuming.values())):
            return
        outcome = self._outcomes.pop(lives, LossOutcome())
        if outcome.pauses or outcome.given_up:
            pauses = sorted(outcome.pauses.values()) or [0.0]
            event(
                "requests go on",
                group=lives[0],
                incarnation=lives[1],
                requests=len(outcome.pauses),
                pause=pauses[len(pauses) // 2],
                longest=pauses[-1],
                given_up=outcome.given_up,
                ids=_shown(outcome.pauses),
            )

    def fail_all(self, error: EngineError) -> None:
        """Ends all waiting requests with an error."""
        for stream in tuple(self.waiting):
            self._give_up(stream, error.reason, error.status)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _give_up(self, stream: OutputStream, why: str, status: int = 503) -> None:
        loss = self.waiting.get(stream)
        if loss is not None:
            self._outcomes[loss.lives].given_up += 1
        self.discard(stream)
        self._counters[stream.group][MigrationCounters.GIVEN_UP] += 1
        stream.fail(EngineError(status, why))

    # ── while requests wait ──
    async def _run(self) -> None:
        """Submits requests again until none waits. A failure ends them all, so that no reader goes on waiting."""
        try:
            while self.waiting:
                self._judge_all()
                self._expire()
                await self._submit_all()
                await asyncio.sleep(BOARD_POLL_S)
        except Exception as error:
            reason = f"the migration of requests has failed: {type(error).__name__}: {error}"
            event("migration failed", logging.ERROR, reason=reason)
            self.fail_all(EngineError(500, reason))
        finally:
            self._task = None

    def _expire(self) -> None:
        is_hopeless = self._board.is_draining and not self._submitter.can_submit
        now = time.monotonic()
        for stream, loss in tuple(self.waiting.items()):
            if is_hopeless:
                self._give_up(stream, f"{loss.why}; the engine is shutting down, and no group serves")
            elif now >= loss.deadline:
                self._give_up(stream, f"{loss.why}; no group has taken the request within {self._timeout:g} s")

    async def _submit_all(self) -> None:
        """Submits the requests of judged losses, in the order in which a core runs them. The most suspected requests
        come last: a core must know all suspects when it chooses which to admit."""
        if not self._submitter.can_submit:
            return
        ready = [(_submitted(stream), stream, loss) for stream, loss in self.waiting.items() if loss.is_judged]
        for submitted, stream, loss in sorted(ready, key=lambda entry: (*entry[0].suspicion, *entry[0].order)):
            if self.waiting.get(stream) is not loss:  # it has ended meanwhile
                continue
            if not self._submitter.groups_for(submitted):  # the group for trials is coming back
                continue
            submitted.may_be_tried = self._blame.has_budget(submitted)
            self._stop_waiting(stream)
            try:
                self._submitter.place_again(stream, submitted)
                self.resuming[stream.request] = loss
                await self._submitter.send_again(stream, submitted)
            except ModelChanged as error:
                self._give_up(stream, error.reason)
                continue
            except EngineError as error:
                self.resuming.pop(stream.request, None)
                event("request waits for a group", logging.WARNING, request=stream.request, reason=error.reason)
                if not stream.is_over and stream not in self.waiting:
                    self._wait(stream, loss)
                self._report_if_last(loss.lives)
                return
            await asyncio.sleep(0)

    # ── blame ──
    def _judge_all(self) -> None:
        """Judges the losses of which the launcher has found the cause."""
        lost: dict[tuple[int, int], list[OutputStream]] = {}
        for stream, loss in self.waiting.items():
            if not loss.is_judged:
                lost.setdefault((loss.group, loss.incarnation), []).append(stream)
        for (group, incarnation), streams in lost.items():
            verdict = self._verdicts.verdict(group, incarnation)
            if verdict is None and self._board.is_draining:  # the launcher starts no group again, and judges none
                verdict = NO_VERDICT
            if verdict is not None:
                event(
                    "requests are resumed",
                    group=group,
                    incarnation=incarnation,
                    cause=CAUSES[verdict.cause],
                    requests=len(streams),
                    in_flight=len(verdict.in_flight),
                    ids=_shown(_submitted(stream).request_id for stream in streams),
                )
                for stream in streams:
                    self._judge(stream, verdict)

    def _judge(self, stream: OutputStream, verdict: Verdict) -> None:
        """Counts a loss for a request. A request that has made groups fail twice while it ran alone is answered with
        500."""
        submitted = _submitted(stream)
        was_in_flight = (self._server, stream.request) in verdict.in_flight
        has_failed = verdict.cause == Cause.ITSELF
        if has_failed and was_in_flight:
            submitted.count_failure(is_alone=verdict.is_trial)
            if verdict.is_trial:
                self._blame.count_trial(submitted, self.waiting[stream].group)
            if submitted.failures_alone == CONVICTION:
                return self._convict(stream)
        elif has_failed and verdict.is_trial:  # the request on trial is the reason also for the failures before
            submitted.failures *= submitted.failures_alone > 0  # but for those of a request that has failed alone, too
            submitted.forgive()
        elif has_failed and submitted.failures == 1:  # a request in flight is the reason, also for the failure before
            submitted.failures = 0
        # A request that was in no step of a group that failed by itself had no part in its end.
        # Failures while a request ran alone have a limit of their own.
        is_counted = verdict.cause != Cause.PLANNED and (not has_failed or (was_in_flight and not verdict.is_trial))
        submitted.failed_migrations += is_counted and has_failed
        self._count(stream, CAUSES[verdict.cause], is_counted=is_counted)

    def _convict(self, stream: OutputStream) -> None:
        submitted, loss = _submitted(stream), self.waiting[stream]
        self._blame.convict(submitted, loss.group)
        event(
            "request has made its group fail",
            logging.ERROR,
            request_id=submitted.request_id,
            request=stream.request,
            group=loss.group,
            incarnation=loss.incarnation,
            failures=submitted.failures,
            reason=loss.why,
        )
        times = f"{submitted.failures} times with this request in its step, {CONVICTION} of them with no other"
        why = f"a process has failed {times}"
        self._give_up(stream, f"{why}: {loss.why}", 500)

    def _count(self, stream: OutputStream, cause: str, *, is_counted: bool = True) -> None:
        submitted, loss = _submitted(stream), self.waiting[stream]
        submitted.migrations += is_counted
        # A failure counts half: it may be the doing of another request.
        if 2 * submitted.migrations - submitted.failed_migrations > 2 * self._limit:
            self._give_up(
                stream, f"{loss.why}; the request has been resumed {submitted.migrations - 1} times (migration_limit)"
            )
            return
        loss.is_judged = True
        self._counters[loss.group][MigrationCounters.MIGRATIONS.at[cause]] += 1


def _shown(request_ids: Iterable[str]) -> str:
    """Returns the first ids, and the number of the rest."""
    ids = list(request_ids)
    return ", ".join(ids[:SHOWN_IDS]) + (f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else "")


def _submitted(stream: OutputStream) -> SubmittedRequest:
    assert stream.submitted is not None, "a request that is not kept does not wait"
    return stream.submitted
