"""Requests that wait in front of the scheduler: for an absent output processor, or while a suspect is on trial.

A suspect was in the steps in flight of a group that failed by itself. A suspect that generates TRIAL_TOKENS more tokens
is cleared, also beside innocent requests: a request that makes a group fail at some token fails again at that token.
Suspects are admitted in batches, each when the previous batch is cleared: a batch is 1/BATCH_SHARE of the remaining
suspects, the least suspected first. If the group fails again, only the last batch is suspected.

While only suspects are open, the most suspected request runs alone. While innocent requests run, the last suspect with
several failures runs alone after SERVED_RESULTS of their results. A failure during a trial convicts the suspect, as
nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from penstock.engine.protocol.messages import SUSPECT, TRIAL_TOKENS, Submit

BATCH_SHARE = 4  # a smaller share makes suspects wait for longer, a larger one makes the group fail more often
SERVED_RESULTS = 64  # of innocent requests, between two trials

Number: TypeAlias = tuple[int, int]  # of a server, and its number of a request
Queued: TypeAlias = tuple[Submit, int]  # and when it came


class AdmissionGate:
    """Decides which requests go to the scheduler. No input, no output, no clock."""

    def __init__(self, outputs: int) -> None:
        self._outputs = max(1, outputs)
        self._waiting: dict[Number, Queued] = {}  # in the order of their arrival
        self._suspects: dict[Number, Queued] = {}
        self._batch: list[Number] = []  # suspects that were admitted last and are not cleared
        self._refused: list[Number] = []  # suspects that were to run alone, and may not
        self._absent: Collection[int] = ()
        self._results = 0  # since the core began, or since the last trial
        self.trial: Number | None = None  # the suspect that runs alone

    @property
    def open_requests(self) -> int:
        return len(self._waiting) + len(self._suspects)

    @property
    def open_samples(self) -> int:
        return sum(submit.params.n for held in (self._waiting, self._suspects) for submit, _ in held.values())

    @property
    def suspects(self) -> int:
        """Returns the number of suspects that wait or run, and are not cleared."""
        return len(self._suspects) + len(self._batch)

    @property
    def needs_quiet(self) -> bool:
        """Returns whether a suspect waits for all other requests to leave the scheduler."""
        if self._batch or self._results < SERVED_RESULTS:
            return False
        ready = self._ready(self._suspects)
        return len(ready) == 1 and self._suspects[ready[0]][0].failures >= SUSPECT

    def put(self, submit: Submit, queued_ns: int) -> bool:
        """Adds a request. Returns False, and adds nothing, if one of this number waits here."""
        number = submit.server, submit.request
        if number in self._waiting or number in self._suspects:
            return False
        held = self._suspects if submit.failures else self._waiting
        held[number] = submit, queued_ns
        return True

    def abort(self, server: int, request: int) -> None:
        """Drops a waiting request. An unknown request is no error."""
        for held in (self._waiting, self._suspects):
            held.pop((server, request), None)

    def forget_server(self, server: int) -> list[int]:
        """Drops all waiting requests of a server and returns their numbers."""
        numbers = [number for held in (self._waiting, self._suspects) for number in held if number[0] == server]
        for number in numbers:
            self.abort(*number)
        return [request for _, request in numbers]

    def hold(self, absent: Collection[int]) -> None:
        """Sets the output processors that are away: their requests wait."""
        self._absent = absent

    def take(self, is_quiet: bool, has_delivered: bool, generated: Callable[[Number], int | None]) -> list[Queued]:
        """Returns the requests that go to the scheduler now. `is_quiet`: the scheduler has none, no step is in flight,
        and the output processors have delivered all. `has_delivered`: they have delivered all. `generated` returns how
        many tokens a request has generated here; None: it has ended."""
        if self._batch and (has_delivered or self.trial is None):  # an output may fail with the tokens of a trial
            counts = [(number, generated(number)) for number in self._batch]
            self._batch = [number for number, tokens in counts if tokens is not None and tokens < TRIAL_TOKENS]
        if self.trial is not None and not self._batch:
            self.trial, self._results = None, 0
        if self.trial is not None:
            return []
        if self._suspects and not self._batch:
            self._batch = self._next_batch(is_quiet)
            if self._batch:
                return [self._suspects.pop(number) for number in self._batch]
            if self.needs_quiet:
                return []
        return [self._waiting.pop(number) for number in self._ready(self._waiting)]

    def _ready(self, held: dict[Number, Queued]) -> list[Number]:
        return [number for number in held if number[1] % self._outputs not in self._absent] if self._absent else [*held]

    def _next_batch(self, is_quiet: bool) -> list[Number]:
        """Returns the suspects that are admitted next; none while the last one waits to run alone."""
        ready = sorted(self._ready(self._suspects), key=self._suspicion)
        if len(ready) == 1 and not self._may_be_tried(ready[0]):
            self._suspects.pop(ready[0])
            self._refused += ready
            return []
        if (
            ready
            and self._suspects[ready[-1]][0].may_be_tried
            and is_quiet
            and (not self._waiting or self._results >= SERVED_RESULTS)
        ):
            self.trial = ready[-1]
            return ready[-1:]
        if len(ready) == 1 and self._suspects[ready[0]][0].failures >= SUSPECT:
            return []
        return ready[: -(-len(ready) // BATCH_SHARE)]

    def _may_be_tried(self, number: Number) -> bool:
        submit = self._suspects[number][0]
        return submit.may_be_tried or submit.failures < SUSPECT

    def _suspicion(self, number: Number) -> tuple[int, int]:
        submit = self._suspects[number][0]
        return submit.failures, 0 if submit.progress is None else -int(submit.progress.counts.max())

    def take_refused(self) -> list[Number]:
        """Returns the last suspects if a trial is not allowed, and forgets these suspects."""
        refused, self._refused = self._refused, []
        return refused

    def count_result(self, ids: int) -> None:
        """Counts a result of the scheduler's requests with so many sampled ids."""
        self._results += ids > 0
