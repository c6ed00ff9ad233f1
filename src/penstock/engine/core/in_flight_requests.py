"""The requests in the steps in flight, on the verdict board: what servers find there when this group is lost."""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import RequestWords, VerdictBoard, request_words
from penstock.engine.protocol.columns import NOTHING
from penstock.engine.protocol.messages import Step


class InFlightRequests:
    """Writes the list before a step is broadcast, where it differs from the list before. A steady step writes none."""

    def __init__(self, tree: Cluster, me: ProcessId, slots: int) -> None:
        self._board = VerdictBoard(tree.verdicts, writable=True)
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
        self._write(is_trial)

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

    def on_result(self) -> None:
        """Removes the oldest step, which is done."""
        self._steps.popleft()

    def on_idle(self) -> None:
        """Clears the list: no step is in flight."""
        self._write(False)

    def _write(self, is_trial: bool) -> None:
        lists = [*self._steps]
        if len(lists) == 2 and lists[0] is lists[1]:
            lists.pop()
        if len(lists) == len(self._written) and all(map(lambda new, old: new is old, lists, self._written)):
            return
        self._tag += 1
        self._board.write_requests(self._me.group, self._me.incarnation, self._tag, lists, is_trial)
        self._written = lists
