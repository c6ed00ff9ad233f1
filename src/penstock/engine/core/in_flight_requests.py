"""The requests in the steps in flight, on the verdict board: servers read the board when this group is lost.

The board also lists the requests that the scheduler gets next, and ended requests until an output processor has
delivered their end: a request may make the core or an output processor fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from penstock.engine.cluster.topology import MAX_BESIDE, Cluster, ProcessId
from penstock.engine.cluster.verdict_board import RequestWords, VerdictBoard, request_words
from penstock.engine.protocol.columns import NOTHING
from penstock.engine.protocol.messages import Step


class InFlightRequests:
    """Writes the list before a step is broadcast, where it differs from the list before, and before requests are
    admitted. A steady step writes none."""

    def __init__(
        self, cluster: Cluster, me: ProcessId, slots: int, undelivered: Callable[[], Sequence[tuple[int, int]]]
    ) -> None:
        """`undelivered` returns the requests (server, number) with ends that are not delivered."""
        self._undelivered = undelivered
        self._board = VerdictBoard(cluster.verdicts, writable=True)
        self._me = me
        self._request_of = np.zeros(slots, np.uint64)  # by slot
        self._is_running = np.zeros(slots, np.bool_)
        self._running: RequestWords = NOTHING.astype(np.uint64)  # after the last step that was sent
        self._steps: deque[RequestWords] = deque()  # of each step in flight
        self._written: list[RequestWords] = []
        self._tag = 0

    def on_step(self, step: Step, is_trial: bool) -> None:
        """Adds a step, which is sent next."""
        if any(change is not None for change in (step.left, step.preempted, step.joined, step.resumed)):
            self._apply(step)
        self._steps.append(self._running)
        self._write(self._lists(), is_trial)

    def _apply(self, step: Step) -> None:
        for slots in (step.left, step.preempted):
            if slots is not None:
                self._is_running[slots] = False
        joined = step.joined
        if joined is not None:
            servers = 0 if joined.servers is None else joined.servers
            self._request_of[joined.slots] = request_words(servers, joined.requests)
            self._is_running[joined.slots] = True
        if step.resumed is not None:
            self._is_running[step.resumed.slots] = True
        self._running = self._request_of[self._is_running]

    def on_admit(self, numbers: Sequence[tuple[int, int]], is_trial: bool) -> None:
        """Adds requests (server, number) that the scheduler gets next, until the next step is sent."""
        self._write([*self._lists(), _words(numbers)], is_trial)

    def on_result(self) -> None:
        """Removes the oldest step, which is done."""
        self._steps.popleft()

    def on_idle(self) -> None:
        """Clears the list: no step is in flight."""
        self._write([], False)

    def _lists(self) -> list[RequestWords]:
        lists = [*self._steps]
        if len(lists) == 2 and lists[0] is lists[1]:
            lists.pop()
        ended = self._undelivered()
        return [*lists, _words(ended)] if ended else lists

    def _write(self, lists: list[RequestWords], is_trial: bool) -> None:
        if len(lists) == len(self._written) and all(map(lambda new, old: new is old, lists, self._written)):
            return
        self._tag += 1
        self._board.write_requests(self._me.group, self._me.incarnation, self._tag, lists, is_trial)
        self._written = lists


def _words(numbers: Sequence[tuple[int, int]]) -> RequestWords:
    servers, requests = zip(*numbers[:MAX_BESIDE], strict=True)
    return request_words(servers, requests)
