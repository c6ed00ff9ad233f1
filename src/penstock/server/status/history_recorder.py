"""Records the history of a server in its launcher: a point each second, the return of engines, refusals.

Reads the status board and the counters of the servers. `history` has the page.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from penstock.engine.cluster.counter import Bounds, Counter
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.counters import ProcessCounters, Served, ServerCounters
from penstock.server.status.history import Point, ServerHistory

POINT_S = 1.0
WATCH_S = 0.25  # seconds between two polls of the engines' incarnations
WINDOW = 60  # points that a quantile covers
REFUSALS_S = 10.0  # seconds of refusals that are one event, after the first refusal
REFUSED = ("429", "500", "503", "504")  # statuses: the server or an engine did not answer
GROWING = (  # counters of an engine; an engine that was started again counts from 0
    *(StatusBoard.SAMPLED, StatusBoard.COMPUTED, StatusBoard.PREEMPTIONS, StatusBoard.STEPS),
    *(StatusBoard.BUSY_NS, StatusBoard.IDLE_NS, StatusBoard.OWN_NS),
)
PARTS = (StatusBoard.QUEUE_TIMES, StatusBoard.PREFILL_TIMES)  # of the time to the first token; as GROWING
WORDS = (*GROWING, *(word for part in PARTS for word in range(part, part + part.spec.words)))
LATENCIES = (Served.FIRST_TOKEN, Served.INTER_TOKEN)
QUANTILES = (0.5, 0.95, 0.99)


def quantile(bounds: Bounds, counts: Sequence[int], share: float) -> float:
    """Returns a quantile of a histogram, interpolated within its bucket; NaN without values. Values above all bounds
    count as the last bound."""
    total = sum(counts)
    if total <= 0:
        return math.nan
    rank = share * total
    for index, up_to in enumerate(accumulate(counts[:-1])):
        if up_to >= rank and counts[index]:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - up_to + counts[index]) / counts[index]
    return bounds[-1]


class PointBuilder:
    """Makes points of the growth of counters."""

    def __init__(self, board: StatusBoard, tally: ServerCounters) -> None:
        self._board = board
        self._servers = tally.rows
        self._at = 0.0
        self._engines: list[dict[int, int]] = []
        self._total = [0] * StatusBoard.WORDS  # a row with the growth of WORDS of all engines
        self._answers: Tally[str] = Tally()
        self._latencies: deque[list[list[int]]] = deque(maxlen=WINDOW + 1)
        self._part_sums: deque[list[tuple[int, float]]] = deque(maxlen=WINDOW + 1)  # count and sum of each part

    def build(self, now: float, refusals: Tally[str]) -> Point:
        """Returns the point of the time since the last one, and adds its refusals by status to `refusals`."""
        rows, seconds = self._board.rows, max(now - self._at, 1e-3)
        grown = self._growth([{word: row[word] for word in WORDS} for row in rows])
        answers, self._answers = self._answers, self._count_answers()
        recent = self._answers - answers if self._at else Tally()
        refusals.update({status: recent[status] for status in REFUSED if recent[status]})
        self._at = now
        generated, prompts, preempted, steps, *step_ns = (grown[counter] for counter in GROWING)
        blocks = sum(row[StatusBoard.BLOCKS] for row in rows)
        return Point(
            now,
            sum(row[ProcessCounters.OPEN] for row in self._servers),
            sum(row[StatusBoard.RUNNING] for row in rows),
            sum(row[StatusBoard.WAITING] for row in rows),
            1 - sum(row[StatusBoard.FREE_BLOCKS] for row in rows) / blocks if blocks else 0.0,
            generated / seconds,
            prompts / seconds,
            recent.total() / seconds,
            sum(recent[status] for status in REFUSED) / seconds,
            preempted / seconds,
            *self._quantiles(),
            *self._part_means(),
            *(ns / steps / 1e9 if steps else math.nan for ns in step_ns),
        )

    def _growth(self, engines: list[dict[int, int]]) -> dict[int, int]:
        """Returns the growth of WORDS of all engines since the last call."""
        grown = dict.fromkeys(WORDS, 0)
        for old, new in zip(self._engines, engines):
            is_restarted = any(new[word] < old[word] for word in WORDS)
            for word in WORDS:
                grown[word] += new[word] - (0 if is_restarted else old[word])
        self._engines = engines
        for word, growth in grown.items():
            self._total[word] += growth
        return grown

    def _count_answers(self) -> Tally[str]:
        answers: Tally[str] = Tally()
        for row in self._servers:
            for route_and_status, word in ProcessCounters.ANSWERED.at.items():
                answers[route_and_status[1]] += row[word]
        return answers

    def _quantiles(self) -> list[float]:
        served = [engine.words for row in self._servers for engine in row.engines]
        self._latencies.append([histogram.counts(*served) for histogram in LATENCIES])
        oldest, newest = self._latencies[0], self._latencies[-1]
        return [
            quantile(histogram.spec.bounds, [b - a for a, b in zip(old, new, strict=True)], share)
            for histogram, old, new in zip(LATENCIES, oldest, newest, strict=True)
            for share in QUANTILES
        ]

    def _part_means(self) -> list[float]:
        """Returns the means of PARTS and of pauses. Quantiles would be too coarse: the lowest bound is 0.3 s."""
        lost = [engine.migration.words for row in self._servers for engine in row.engines]
        rows: list[tuple[Counter, list[Any]]] = [(part, [self._total]) for part in PARTS]
        rows.append((MigrationCounters.PAUSE, lost))
        self._part_sums.append([(sum(part.counts(*words)), part.sum_of(*words)) for part, words in rows])
        oldest, newest = self._part_sums[0], self._part_sums[-1]
        return [
            (new_sum - old_sum) / (new_count - old_count) if new_count > old_count else math.nan
            for (old_count, old_sum), (new_count, new_sum) in zip(oldest, newest, strict=True)
        ]


class HistoryRecorder:
    """Records until it is cancelled."""

    def __init__(self, history: ServerHistory, board: StatusBoard, tally: ServerCounters) -> None:
        self._history = history
        self._board = board
        self._points = PointBuilder(board, tally)
        self._lost_at: dict[int, float] = {}  # engines that have served, and do not
        self._incarnations: Tally[int] = Tally()  # the last that served, by engine
        self._refusals: Tally[str] = Tally()
        self._reported_at = 0.0

    async def run(self) -> None:
        due = 0.0
        while True:
            now = time.time()
            self.watch_engines(now)
            if now >= due or now < due - 2 * POINT_S:  # the second: the clock was set back
                self._history.add(self._points.build(now, self._refusals))
                self.report_refusals(now)
                due = now + POINT_S - now % POINT_S
            await asyncio.sleep(WATCH_S)

    def watch_engines(self, now: float) -> None:
        """Reports the return of engines. Called at each poll, and before and after the launcher marks a loss."""
        for engine, row in enumerate(self._board.rows):
            incarnation, last = row[StatusBoard.SERVING], self._incarnations[engine]
            if incarnation == last:
                continue
            if incarnation and last:
                away = now - self._lost_at.pop(engine, now)
                event("engine serves again", engine=engine, incarnation=incarnation, away=away)
            if incarnation:
                self._incarnations[engine] = incarnation
            else:
                self._lost_at.setdefault(engine, now)

    def report_refusals(self, now: float) -> None:
        """Reports the first refusal at once, and those that follow every REFUSALS_S."""
        if not self._refusals or now - self._reported_at < REFUSALS_S:
            return
        statuses = ", ".join(f"{number} x {status}" for status, number in sorted(self._refusals.items()))
        event("requests refused", statuses=statuses, seconds=min(now - self._reported_at, REFUSALS_S))
        self._refusals.clear()
        self._reported_at = now
