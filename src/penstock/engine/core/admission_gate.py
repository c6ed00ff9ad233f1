"""Requests that wait in front of the scheduler: for an output processor that is away, or while a suspect is on trial.

A suspect was in the steps in flight of several groups that failed by themselves. Suspects run alone, one at a time,
those with the fewest generated tokens first: if the group fails then, the request is the reason. One that has generated
TRIAL_TOKENS more is cleared: its server submits it again, and it waits for the end of all trials.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from penstock.engine.protocol.messages import Submit

SUSPECT = 2  # failures of a request that is to be tried
TRIAL_TOKENS = 16  # steps that have sampled tokens of the suspect, until it is cleared

Number: TypeAlias = tuple[int, int]  # of a server, and its number of a request
Queued: TypeAlias = tuple[Submit, int]  # and when it came


class AdmissionGate:
    """Decides which requests go to the scheduler. No input, no output, no clock."""

    def __init__(self, outputs: int) -> None:
        self._outputs = max(1, outputs)
        self._waiting: dict[Number, Queued] = {}  # in the order of their arrival
        self._suspects: dict[Number, Queued] = {}
        self._absent: Collection[int] = ()
        self._sampled = 0  # steps of the trial that have sampled
        self.trial: Number | None = None  # the suspect that runs

    @property
    def open_requests(self) -> int:
        return len(self._waiting) + len(self._suspects)

    @property
    def open_samples(self) -> int:
        return sum(submit.params.n for held in (self._waiting, self._suspects) for submit, _ in held.values())

    @property
    def needs_quiet(self) -> bool:
        """Returns whether a suspect waits for all other requests to leave the scheduler."""
        return bool(self._suspects) and self.trial is None

    def put(self, submit: Submit, queued_ns: int) -> bool:
        """Adds a request. Returns False, and adds nothing, if one of this number waits here."""
        number = submit.server, submit.request
        if number in self._waiting or number in self._suspects:
            return False
        held = self._suspects if submit.failures >= SUSPECT else self._waiting
        held[number] = submit, queued_ns
        return True

    def abort(self, server: int, request: int) -> None:
        """Drops a request that waits. Another one is no error."""
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

    def take(self, is_scheduler_empty: bool) -> list[Queued]:
        """Returns the requests that go to the scheduler now. `is_scheduler_empty`: it has none, and no step is in
        flight."""
        if is_scheduler_empty:
            self.trial = None
        held = self._suspects or self._waiting
        if self.trial is not None or not held:
            return []
        ready = (
            [number for number in held if number[1] % self._outputs not in self._absent] if self._absent else [*held]
        )
        if held is self._suspects:
            if not is_scheduler_empty or not ready:
                return []
            self.trial = min(ready, key=self._generated)
            self._sampled = 0
            ready = [self.trial]
        return [held.pop(number) for number in ready]

    def _generated(self, number: Number) -> int:
        progress = self._suspects[number][0].progress
        return 0 if progress is None else progress.ids.size

    def count_result(self, ids: int) -> bool:
        """Counts a result with so many sampled ids. Returns whether it clears the suspect."""
        if self.trial is None or not ids:
            return False
        self._sampled += 1
        return self._sampled == TRIAL_TOKENS
