"""Many implementations in turn: a ratio compares what was measured within the same seconds, or it is not given."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bench.harness.figures import Figures, median_figures
from bench.harness.output import Output, short
from bench.harness.phases import Order
from bench.harness.quiet import FOREIGN_LIMIT, Load, Patience, load_between, look
from bench.harness.sessions import Session, SessionFailed
from bench.impls import IMPLEMENTATIONS, Implementation

TRIES = 3  # of a round that was disturbed
LARGE_NBYTES = 1 << 20

Measure = Callable[[Session, Order], Figures]
Cell = Callable[[Figures], str]
Answer = TypeVar("Answer")


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """A B C, B C A, …: no name is always the first."""
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


@dataclass
class Outcome:
    """What one case gave: for each implementation one set of figures per round, and how quiet the rounds were."""

    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        return all(load.is_quiet for load in self.loads)

    @property
    def foreign_cores(self) -> float:
        return max((load.cores for load in self.loads), default=0.0)

    def figures(self, name: str) -> Figures:
        return median_figures(self.rounds[name])

    def ratio(self, name: str, key: str, reference: str) -> float:
        """How many times the reference's figure, round by round; the median of that."""
        pairs = zip(self.rounds[name], self.rounds[reference], strict=True)
        return statistics.median(remote[key] / max(ours[key], 1e-9) for remote, ours in pairs)

    def ratio_if_measured(self, name: str, key: str, reference: str) -> float | None:
        """Returns the ratio, or None if a way was not measured."""
        return self.ratio(name, key, reference) if {name, reference} <= self.rounds.keys() else None

    def part(self, prefix: str) -> Outcome:
        """Returns the figures with keys that begin with the prefix, without the prefix."""
        rounds = {
            name: [
                {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}
                for figures in result
            ]
            for name, result in self.rounds.items()
        }
        return Outcome(rounds, self.loads)


@dataclass(frozen=True)
class Column:
    """One column of a table: an outcome, how one cell of it reads, and the figure that is compared."""

    outcome: Outcome
    cell: Cell
    key: str


class Turns:
    """The sessions that are up, taking turns; and what is said about the outcome."""

    def __init__(
        self, output: Output, patience: Patience, *, reference: str, rounds: int, is_pinned: bool, is_noisy: bool
    ) -> None:
        self.output = output
        self.rounds = rounds
        self.receivers = 0
        self._patience = patience
        self._reference = reference
        self._is_pinned = is_pinned
        self._is_noisy = is_noisy
        self._sessions: dict[str, Session] = {}

    # Sessions

    def open(self, implementations: Sequence[Implementation], receivers: int) -> None:
        """Starts the processes of all implementations at once; one that cannot start is reported and left out."""
        self.receivers = receivers
        for implementation in implementations:
            try:
                self._sessions[implementation.name] = Session(implementation, receivers, is_pinned=self._is_pinned)
            except Exception as failure:
                self._leave_out(implementation.name, failure)
        for session in list(self._sessions.values()):
            self._guarded(session, session.wait_until_ready)

    def close(self) -> dict[str, int]:
        """Ends all sessions in peace; what each had reserved, in bytes."""
        reserved: dict[str, int] = {}
        for name, session in list(self._sessions.items()):
            for nbytes in self._guarded(session, session.close):
                reserved[name] = nbytes
        self._sessions.clear()
        return reserved

    def kill(self) -> None:
        """Ends all sessions at once."""
        for session in self._sessions.values():
            session.kill()
        self._sessions.clear()

    def _guarded(self, session: Session, action: Callable[[], Answer]) -> list[Answer]:
        """The action's answer, or nothing: a session that fails is ended and takes no further part."""
        try:
            return [action()]
        except (SessionFailed, OSError) as failure:
            self._leave_out(session.name, failure)
            session.kill()
            self._sessions.pop(session.name, None)
            return []

    def _leave_out(self, name: str, failure: Exception) -> None:
        among = {"receivers": self.receivers} if self.receivers else {}  # servers have none
        actual = f"{name} with {self.receivers} receivers" if among else name
        self.output.say(f"\n{actual} is left out from here on: {failure}")
        self.output.record("failed", name, **among, reason=str(failure))

    # Measuring

    def same_order(self, order: Order) -> dict[str, Order]:
        """That order for every implementation that takes such."""
        takers = (session.implementation for session in self._sessions.values())
        return {each.name: order for each in takers if each.takes(order.kind, order.nbytes)}

    def timed_orders(self, kind: str, nbytes: int, seconds: float, least: int, most: int) -> dict[str, Order]:
        """As many messages as fit the time, found by a short trial, which warms up too."""
        orders: dict[str, Order] = {}
        for name, trial in self.same_order(Order(kind, nbytes, 2 if nbytes >= LARGE_NBYTES else 30)).items():
            for reports in self._guarded(self._sessions[name], partial(self._sessions[name].perform, trial)):
                each = max(reports[0].wall / trial.messages, 1e-7)
                orders[name] = trial._replace(messages=int(min(max(seconds / each, least), most)))
        return orders

    def take(self, orders: dict[str, Order], measure: Measure, rounds: int) -> Outcome:
        """A B C, B C A, …: each implementation once in every round; a disturbed round is measured again."""
        outcome = Outcome({name: [] for name in orders})
        for turn in range(rounds):
            for attempt in range(TRIES):
                before = look()
                figures_of = self._one_round(turn, orders, measure)
                load = load_between(before, look())
                if load.is_quiet or attempt == TRIES - 1:
                    break
                self._patience.spend(load.wall)
                if not self._patience.wait_for_quiet():
                    break
            outcome.loads.append(load)
            for name, figures in figures_of.items():
                outcome.rounds[name].append(figures)
        outcome.rounds = {name: every for name, every in outcome.rounds.items() if len(every) == rounds}
        return outcome

    def _one_round(self, turn: int, orders: Mapping[str, Any], measure: Callable[..., Figures]) -> dict[str, Figures]:
        result: dict[str, Figures] = {}
        for name in in_turn([name for name in orders if name in self._up()], turn):
            for figures in self._turn_of(name, orders[name], measure):
                result[name] = figures
        return result

    def _up(self) -> Container[str]:
        """Returns the names that take part."""
        return self._sessions

    def _turn_of(self, name: str, order: Any, measure: Callable[..., Figures]) -> list[Figures]:
        """Its figures, or nothing: then it takes no further part."""
        session = self._sessions[name]
        return self._guarded(session, partial(measure, session, order))

    # Telling

    def compares(self, outcome: Outcome) -> bool:
        return (outcome.is_quiet or self._is_noisy) and self._reference in outcome.rounds

    def record(self, case: str, outcome: Outcome, keys: Sequence[str], key: str, **parameters: Any) -> None:
        """One JSON record for each implementation, with the ratio of the figure `key` where it may be given."""
        for name, every in outcome.rounds.items():
            figures = {each: value for each, value in outcome.figures(name).items() if each in keys}
            if self.compares(outcome):
                figures[f"ratio_to_{self._reference}"] = outcome.ratio(name, key, self._reference)
            self.output.record(
                case,
                name,
                **parameters,
                **figures,
                rounds=len(every),
                foreign_cores=outcome.foreign_cores,
                quiet=outcome.is_quiet,
            )

    def table(self, title: str, columns: dict[str, Column]) -> None:
        """One row for each implementation; below it, why something was not compared."""
        names = [name for name in IMPLEMENTATIONS if any(name in each.outcome.rounds for each in columns.values())]
        if not names:
            return
        rows = [(name, [self._cell(name, column) for column in columns.values()]) for name in names]
        self.output.table(title, list(columns), rows)
        for label, column in columns.items():
            if not column.outcome.is_quiet:
                verdict = "compared all the same (--noisy)" if self._is_noisy else "not compared"
                loads = ", ".join(f"{load.cores:.2f}" for load in column.outcome.loads)
                self.output.say(
                    f"  {label}: {verdict}: foreign processes took {loads} cores in its rounds; "
                    f"the limit is {FOREIGN_LIMIT:.2f}"
                )

    def _cell(self, name: str, column: Column) -> str:
        if name not in column.outcome.rounds:
            return "-"
        text = column.cell(column.outcome.figures(name))
        if self.compares(column.outcome):
            ratio = column.outcome.ratio(name, column.key, self._reference)
            text += f"×{short(ratio)}".rjust(9)
        return text
